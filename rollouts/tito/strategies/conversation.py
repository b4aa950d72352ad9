"""A recorded trajectory as strategies see it: conversations that grow, a new one wherever history was rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollouts.tito.interfaces import Conversation
from rollouts.tito.strategies.protocol import StrategyRefused, Tools
from rollouts.tito.trajectory import Floats, Message, Step


@dataclass(frozen=True, eq=False)
class ConversationTurn:
    """A completion, and what the conversation gained before the next one."""

    step: Step
    reply: Message | None
    """The assistant's message as the next request repeats it, else as it was parsed."""
    following: tuple[Message, ...] | None
    """The messages that came before the next completion; None for the last one of its segment."""

    @cached_property
    def logprobs(self) -> Floats | None:
        return matching_logprobs(self.step)

    @cached_property
    def prompt_bytes(self) -> bytes:
        return self.step.prompt_ids.tobytes()


@dataclass(frozen=True, eq=False)
class ConversationSegment:
    """A stretch of steps of which each continues the conversation of the one before."""

    start: int
    """Index of its first step."""
    messages: tuple[Message, ...]
    """What its first step was asked."""
    tools: Tools
    kwargs: Mapping[str, Any]
    turns: tuple[ConversationTurn, ...]

    @cached_property
    def prompt_asks(self) -> list[Conversation]:
        """The render of each prompt. One list for all strategies, so that what they share is seen at once."""
        return [Conversation(prompt, self.tools, self.kwargs, True) for prompt in self.prompts]

    @cached_property
    def reply_asks(self) -> list[Conversation]:
        """The render behind each reply that is known, the last one's included: the whole conversation."""
        return [
            Conversation([*prompt, turn.reply], self.tools, self.kwargs, False)
            for turn, prompt in zip(self.turns, self.prompts, strict=True)
            if turn.reply is not None
        ]

    @cached_property
    def prompts(self) -> list[list[Message]]:
        """The conversation at each of its steps, without the reply."""
        prompts = [list(self.messages)]
        for turn in self.turns[:-1]:
            prompts.append([*prompts[-1], *([] if turn.reply is None else [turn.reply]), *(turn.following or ())])
        return prompts


def matching_logprobs(step: Step) -> Floats | None:
    """A step's log-probabilities, if there is one for each id."""
    fits = step.logprobs is not None and len(step.logprobs) == len(step.completion_ids)
    return step.logprobs if fits else None


def segments(steps: Sequence[Step]) -> list[ConversationSegment]:
    """The steps, cut where a request does not continue the one before: there the past was rewritten, or another branch
    goes on. Raises :class:`StrategyRefused` where messages are lacking."""
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
    """Whether a request is the one before, its reply, and what came then."""
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
