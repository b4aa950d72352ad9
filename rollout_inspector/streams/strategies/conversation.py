"""Cuts a recorded trajectory into conversations that grow. A new one begins where history was rewritten."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.recorded_renders import NOW, Form, first_rendered, kwargs_of_record, with_objects
from rollout_inspector.streams.strategies.protocol import (
    Context, ConversationSegment, ConversationTurn, StrategyRefused
)
from rollout_inspector.streams.trajectory import Message, Step


def segments(steps: Sequence[Step]) -> list[ConversationSegment]:
    """The steps, cut where a request does not continue the request before: history was rewritten, or a branch begins.
    Raises :class:`StrategyRefused` where messages are missing."""
    if not steps:
        raise StrategyRefused("The trajectory holds rows alone; a strategy is replayed over steps.")
    if steps[0].request is None:
        raise StrategyRefused("The trajectory was recorded without messages, and a strategy is replayed over them.")
    parts: list[ConversationSegment] = []
    turns: list[ConversationTurn] = []
    start = 0
    for index, step in enumerate(steps):
        _messages(index, step)
        following = steps[index + 1] if index + 1 < len(steps) else None
        turn = None if following is None else _continued(index, step, following)
        turns.append(turn or ConversationTurn(step, step.reply, None))
        if turn is None:
            first = steps[start].request
            assert first is not None
            parts.append(
                ConversationSegment(start, first.messages, first.tools, first.chat_template_kwargs, tuple(turns))
            )
            start, turns = index + 1, []
    return parts


def for_template(segment: ConversationSegment, context: Context) -> list[ConversationSegment]:
    """The segment with the arguments that the template takes and the date of the record. If the date is not known,
    there are two segments: only rows that are the same under both hold no invented date."""
    step, request = segment.turns[0].step, segment.turns[0].step.request
    assert request is not None
    dated = kwargs_of_record(step, request, context.renderer, context.codec)
    if context.rows is not None and NOW not in dated[0]:
        dated = kwargs_of_record(step, request, context.rows.renderer, context.codec)
    takes = _form(segment, dated[0], context)
    turns = tuple(
        replace(
            turn, reply=None if turn.reply is None else takes([turn.reply])[0],
            following=None if turn.following is None else tuple(takes(turn.following)),
        )
        for turn in segment.turns
    )
    prompt = step.prompt_ids if context.keeps_prompts and len(step.prompt_ids) else None
    messages = tuple(takes(segment.messages))
    return [
        replace(segment, messages=messages, kwargs=dated_kwargs, turns=turns, recorded_prompt=prompt)
        for dated_kwargs in dated
    ]


def _form(segment: ConversationSegment, kwargs: Mapping[str, Any], context: Context) -> Form:
    """The form of arguments that the context's template takes. It is looked for in the first calls that render."""
    if context.cache.form is None and any(message.get("tool_calls") for message in segment.whole):
        rendered = first_rendered(context.renderer, Conversation(segment.whole, segment.tools, kwargs))
        if rendered is not None:
            context.cache.form = rendered[0]
    return context.cache.form or with_objects


def continues(step: Step, following: Step) -> bool:
    """Whether a request consists of the request before, its reply and further messages."""
    if step.request is None or following.request is None:
        return False
    sent, following_messages = step.request.messages, following.request.messages
    return (
        len(following_messages) > len(sent)
        and following_messages[: len(sent)] == sent
        and following_messages[len(sent)].get("role") == "assistant"
    )


def _continued(index: int, step: Step, following: Step) -> ConversationTurn | None:
    n, messages = len(_messages(index, step)), _messages(index + 1, following)
    return ConversationTurn(step, messages[n], messages[n + 1 :]) if continues(step, following) else None


def _messages(index: int, step: Step) -> tuple[Message, ...]:
    if step.request is None:
        raise StrategyRefused(f"Step {index} was recorded without its messages, and a strategy is replayed over them.")
    return step.request.messages
