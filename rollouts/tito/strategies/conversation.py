"""Cuts a recorded trajectory into conversations that grow. A new one begins where history was rewritten."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.tito.strategies.protocol import ConversationSegment, ConversationTurn, StrategyRefused
from rollouts.tito.trajectory import Message, Step


def segments(steps: Sequence[Step]) -> list[ConversationSegment]:
    """The steps, cut where a request does not continue the request before: history was rewritten, or a branch begins.

    Raises :class:`StrategyRefused` where messages are missing.
    """
    if not steps:
        raise StrategyRefused("The trajectory holds rows alone; a strategy is replayed over steps.")
    if steps[0].request is None:
        raise StrategyRefused("The trajectory was recorded without messages, and a strategy is replayed over them.")
    found: list[ConversationSegment] = []
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
            found.append(
                ConversationSegment(start, first.messages, first.tools, first.chat_template_kwargs, tuple(turns))
            )
            start, turns = index + 1, []
    return found


def continues(step: Step, following: Step) -> bool:
    """Whether a request consists of the request before, its reply and further messages."""
    if step.request is None or following.request is None:
        return False
    sent, said = step.request.messages, following.request.messages
    return len(said) > len(sent) and said[: len(sent)] == sent and said[len(sent)].get("role") == "assistant"


def _continued(index: int, step: Step, following: Step) -> ConversationTurn | None:
    n, said = len(_messages(index, step)), _messages(index + 1, following)
    return ConversationTurn(step, said[n], said[n + 1 :]) if continues(step, following) else None


def _messages(index: int, step: Step) -> tuple[Message, ...]:
    if step.request is None:
        raise StrategyRefused(f"Step {index} was recorded without its messages, and a strategy is replayed over them.")
    return step.request.messages
