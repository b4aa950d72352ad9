"""One chat template for the engine's prompts, another for the trainer's rows (verl, source 4)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.strategies.protocol import Context, ConversationSegment, Strategy, StrategyRefused, Tools
from rollout_inspector.streams.trajectory import Floats, Ids, Message, Row


class TwoTemplates(Strategy):
    """Two instances of a strategy that get the same input: one makes the prompts, the other makes the rows."""

    def __init__(self, prompts: Strategy, rows: Strategy) -> None:
        self._prompts, self._rows = prompts, rows
        self.slug, self.continues_message = prompts.slug, prompts.continues_message

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._prompts.recorded_prompt = self.recorded_prompt  # the rows' template makes its own
        prompt = self._prompts.begin(messages, tools, kwargs)
        with _OfTheRows():
            self._rows.begin(messages, tools, kwargs)
        return prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._prompts.sampled(ids, logprobs, reply)
        with _OfTheRows():
            self._rows.sampled(ids, logprobs, reply)

    def observe(self, messages: Sequence[Message]) -> Ids:
        prompt = self._prompts.observe(messages)
        self.delta_origin = self._prompts.delta_origin
        with _OfTheRows():
            self._rows.observe(messages)
        return prompt

    def foresee(self, segment: ConversationSegment) -> Iterable[Conversation]:
        """The renders of the prompts alone: the template of the rows has its own renderer."""
        return self._prompts.foresee(segment)

    def rows(self) -> list[Row]:
        with _OfTheRows():
            return self._rows.rows()


class _OfTheRows:
    """Marks a refusal as one about the template of the rows."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RenderFailed):
            refused = StrategyRefused(str(error))
            refused.of_rows = True
            raise refused from error
        if isinstance(error, StrategyRefused):
            error.of_rows = True


def start(make: Callable[[Context], Strategy], context: Context) -> Strategy:
    """One trajectory under a strategy, with a second template for the rows if the context has one."""
    return make(context) if context.rows is None else TwoTemplates(make(context), make(context.rows))
