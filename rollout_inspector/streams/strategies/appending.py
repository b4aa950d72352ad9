"""The strategies that keep completions verbatim in one growing buffer. They differ in the ids between completions."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.buffer import Buffer
from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.strategies.protocol import (
    Context, ConversationSegment, Extends, KeepsSteps, Strategy, StrategyRefused, Tools, changed_past
)
from rollout_inspector.streams.trajectory import (
    NO_IDS, Floats, Ids, Mask, Message, Origin, Origins, Row, Step, ids_array
)


class Appending(Strategy):
    """``buffer += completion``, then ``buffer += delta(new messages)`` with mask 0. Subclasses make the delta."""

    rows_follow_from_steps = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._buffer = Buffer()
        self._tools: Tools = None
        self._kwargs: Mapping[str, Any] = {}
        self._asked = ("", "")
        self._n_steps = 0
        self._is_closed = True  # the last completion ended with a stop token
        self._closing: Ids = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._ask(tools, kwargs)
        self._probe(messages)
        prompt = self.recorded_prompt
        self._buffer.append_prompt(self._context.first_prompt(messages, tools, kwargs) if prompt is None else prompt)
        return self._buffer.ids

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._buffer.append_sampled(ids, logprobs)
        self._is_closed = len(ids) > 0 and int(ids[-1]) in self._context.stop_ids
        self._n_steps += 1

    def observe(self, messages: Sequence[Message]) -> Ids:
        key, is_closed = self._key(messages), self._is_closed
        if not is_closed:
            key = (*key, "closes the turn")
        delta, self.delta_origin = self._context.cache.remember(key, lambda: self._written(messages, is_closed))
        self._buffer.append_delta(delta, self.delta_origin)
        return self._buffer.ids

    def rows(self) -> list[Row]:
        return [self._buffer.to_row(tuple(range(self._n_steps)))]

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        self._ask(segment.tools, segment.kwargs)
        if segment.recorded_prompt is None:
            yield from segment.prompt_asks[:1]
        for turn in segment.turns[:-1]:
            if turn.following is not None and not self._context.cache.remembers(self._key(turn.following)):
                yield from self._foresee_delta(turn.following)

    def _ask(self, tools: Tools, kwargs: Mapping[str, Any]) -> None:
        self._tools, self._kwargs = tools, kwargs
        self._asked = (self._context.repr_of(tools), self._context.repr_of(kwargs))

    def _key(self, messages: Sequence[Message]) -> Any:
        return self.slug, "delta", self._context.repr_of(messages), self._asked

    def _written(self, messages: Sequence[Message], is_closed: bool = True) -> tuple[Ids, Origins]:
        delta = self._delta(messages)
        if not is_closed:
            # A stop text ended the completion. So the stop token is the template's, with mask 0.
            delta = np.concatenate([self._closing, delta])
        key = "origins", delta.tobytes(), self._context.repr_of(messages)  # most strategies make the same delta
        return delta, self._context.cache.remember(key, lambda: self._context.origins(delta, messages))

    def _probe(self, messages: Sequence[Message]) -> None:
        """Raise :class:`StrategyRefused` for a template that this strategy cannot work with."""

    @abstractmethod
    def _delta(self, messages: Sequence[Message]) -> Ids: ...

    def _foresee_delta(self, messages: Sequence[Message]) -> Iterable[Conversation]:
        return ()

    def _foresee_difference(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Tools
    ) -> Iterator[Conversation]:
        if not self._context.cache.remembers(self._shorter_key(before, tools)):
            yield Conversation(before, tools, self._kwargs, False)
        yield Conversation([*before, *messages], tools, self._kwargs, True)

    def _shorter_key(self, before: Sequence[Message], tools: Tools) -> Any:
        return self.slug, self._context.repr_of(before), tools is None, self._asked

    def _difference(
        self, before: Sequence[Message], messages: Sequence[Message], tools: Tools, stops: frozenset[int]
    ) -> Ids:
        """``R(before + messages) - R(before)``. The shorter render ends after its last stop token."""

        def render_shorter() -> Ids:
            ids = self._context.renderer.render_ids(Conversation(before, tools, self._kwargs, False))
            cut = self._context.after_last(ids, stops)
            # Only separators may be cut. Other text means that the last message ends without a stop token.
            return ids[:cut] if cut and not self._context.codec.decode(ids[cut:]).strip() else ids

        shorter = self._context.cache.remember(self._shorter_key(before, tools), render_shorter)
        self._closing = shorter[-1:] if len(shorter) and int(shorter[-1]) in stops else NO_IDS
        longer = self._context.renderer.render_ids(Conversation([*before, *messages], tools, self._kwargs, True))
        shared = common_prefix(shorter, longer)
        if shared < len(shorter):
            raise changed_past(self.slug, self._context, messages, shorter, longer, shared)
        return longer[len(shorter) :]


USER: Mapping[str, Any] = {"role": "user", "content": "dummy"}


class ToolDelta(Appending):
    """``R([user, call] + new) - R([user, call])``. The dummy call has the real tool's name (source: the TITO post)."""

    slug = "tool_delta"
    about = (
        "Sampled ids stay as they are. The ids between two completions are the difference of two renders of a "
        "small conversation that ends in the same tool call."
    )

    def _probe(self, messages: Sequence[Message]) -> None:
        if not self._tools:
            return
        function = self._tools[0].get("function", self._tools[0])
        result = {"role": "tool", "name": str(function.get("name", "dummy")), "content": "dummy"}
        try:
            self._context.cache.remember(self._key([result]), lambda: self._written([result]))
        except RenderFailed:
            with_id = [{**result, "tool_call_id": "dummy0001"}]
            self._context.cache.remember(self._key(with_id), lambda: self._written(with_id))

    def _delta(self, messages: Sequence[Message]) -> Ids:
        """Templates want a call's arguments as an object or as JSON text. The first form that renders is used."""
        failure: RenderFailed | None = None
        for arguments in FORMS:
            before = self._before(messages, arguments)
            try:
                return self._difference(before, messages, self._tools, self._context.stop_ids)
            except RenderFailed as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _foresee_delta(self, messages: Sequence[Message]) -> Iterator[Conversation]:
        yield from self._foresee_difference(self._before(messages, FORMS[0]), messages, self._tools)

    def _before(self, messages: Sequence[Message], arguments: Any) -> list[Message]:
        """Returns the same objects for equal calls, so that a prefetched render is found."""
        question = [(m.get("role"), m.get("name"), m.get("tool_call_id")) for m in messages]
        key = ("dummy", repr(question), repr(arguments))
        return self._context.cache.remember(key, lambda: dummy_conversation(messages, arguments))


FORMS: tuple[Any, ...] = ({}, "{}")  # A call's arguments, as an object and as JSON text.


def dummy_conversation(messages: Sequence[Message], arguments: Any) -> list[Message]:
    """The smallest conversation before such messages: a call for each tool message, with its real name and id."""
    calls = []
    for message in messages:
        if message.get("role") == "tool":
            function: dict[str, Any] = {"name": message.get("name") or "dummy", "arguments": arguments}
            call: dict[str, Any] = {"type": "function", "function": function}
            if message.get("tool_call_id"):
                call["id"] = message["tool_call_id"]
            calls.append(call)
    if calls:
        return [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    return [USER, {"role": "assistant", "content": "dummy"}]


BASE: tuple[Message, ...] = (
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
)


class FixedBase(Appending):
    """``R(BASE + new) - R(BASE)``. The base is cut after its last EOS, so that the newline stays (SkyRL, verl)."""

    slug = "fixed_base"
    about = (
        "Sampled ids stay as they are. New messages are rendered after one fixed short conversation, and its ids "
        "are cut away."
    )

    def _delta(self, messages: Sequence[Message]) -> Ids:
        eos = self._context.codec.eos_id
        stops = self._context.stop_ids if eos is None else frozenset({eos})
        return self._difference(BASE, messages, None, stops)

    def _foresee_delta(self, messages: Sequence[Message]) -> Iterator[Conversation]:
        yield from self._foresee_difference(BASE, messages, None)


class SingleMessage(Appending):
    """Everything in one assistant message: the completion without its stop token, then the observation, encoded raw. At
    the end one EOS closes the message. It is sampled if the last completion ended with it, else inserted with mask
    0."""

    slug = "single_message"
    about = (
        "The whole episode is one assistant message. Observations are encoded raw and put after the sampled ids, "
        "and one end-of-sequence token closes it."
    )
    rows_follow_from_steps = False
    continues_message = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._stop: tuple[Ids, Floats | None] = (NO_IDS, None)

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        ended = len(ids) > 0 and int(ids[-1]) in self._context.stop_ids
        body = len(ids) - ended
        super().sampled(ids[:body], None if logprobs is None else logprobs[:body], reply)
        self._stop = (ids[body:], None if logprobs is None else logprobs[body:])

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._stop = (NO_IDS, None)  # the message goes on, so its end is dropped
        return super().observe(messages)

    def _delta(self, messages: Sequence[Message]) -> Ids:
        pieces = [self._context.encode(content_text(message)) for message in messages]
        return np.concatenate(pieces) if pieces else NO_IDS

    def rows(self) -> list[Row]:
        (row,) = super().rows()
        ids, logprobs = self._stop
        eos = self._context.codec.eos_id
        is_sampled = len(ids) > 0
        if not is_sampled:
            if eos is None:
                return [row]
            ids, logprobs = ids_array([eos]), None
        row_logprobs = row.logprobs
        if row_logprobs is not None:
            tail = np.full(len(ids), np.nan, dtype=np.float32) if logprobs is None else logprobs
            row_logprobs = np.concatenate([row_logprobs, tail])
        origin = Origin.SAMPLED if is_sampled else Origin.INSERTED
        assert row.origin is not None
        return [
            Row(
                np.concatenate([row.ids, ids]), np.concatenate([row.loss_mask, np.full(len(ids), is_sampled)]),
                row_logprobs, np.concatenate([row.origin, np.full(len(ids), origin, dtype=np.uint8)]),
                step_indices=row.step_indices,
            )
        ]


def content_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


class StepWise(KeepsSteps, ToolDelta):
    """One row per step: prompt with mask 0, completion with mask 1. Training cost grows with the turns squared."""

    slug = "step_wise"
    about = (
        "Every engine call is one row, with its prompt masked and its completion trained. The cost grows with the "
        "square of the turns."
    )
    rows_follow_from_steps = False

    def take_recorded(self, steps: Sequence[Step]) -> None:
        """Take the recorded steps. A row holds what the engine read, even if history was rewritten."""
        self._steps = list(steps)

    def rows(self) -> list[Row]:
        last = len(self._steps) - 1
        return [_row(step, index, is_last=index == last) for index, step in enumerate(self._steps)]


class StepWiseMerged(StepWise):
    """The step-wise rows. Neighbours are merged while the next prompt starts with prompt and response (SkyRL)."""

    slug = "step_wise_merged"
    about = "Step-wise rows, merged while the next prompt starts with the prompt and completion before it."
    rows_follow_from_steps = True

    def rows(self) -> list[Row]:
        return KeepsSteps.rows(self)


def _row(step: Step, index: int, is_last: bool) -> Row:
    ids, n_prompt = step.stream, len(step.prompt_ids)
    mask: Mask = np.zeros(len(ids), dtype=np.bool_)
    mask[n_prompt:] = True
    origin: Origins = np.empty(len(ids), dtype=np.uint8)
    origin[:n_prompt], origin[n_prompt:] = int(Origin.PROMPT), int(Origin.SAMPLED)
    logprobs: Floats | None = None
    if step.logprobs is not None:
        logprobs = np.empty(n_prompt + len(step.logprobs), dtype=np.float32)
        logprobs[:n_prompt], logprobs[n_prompt:] = np.nan, step.logprobs
    return Row(ids, mask, logprobs, origin, step_indices=(index,), extra={"is_last_step": is_last})


class Bridge(Appending):
    """``bridge_to_next_turn`` of the ``renderers`` library (source 3), written by hand for each family of models."""

    slug = "bridge"
    package = "renderers"
    about = "An object that knows the model's format extends the stream exactly, or refuses."

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._bridge: Extends | None = None
        self._prompt = self._completion = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        if self._context.bridge is None:
            raise StrategyRefused("bridge needs the package renderers and a run's tokenizer. Here both are missing.")
        self._bridge = self._context.bridge(kwargs)
        self._prompt = super().begin(messages, tools, kwargs)
        return self._prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        super().sampled(ids, logprobs, reply)
        self._completion = ids

    def observe(self, messages: Sequence[Message]) -> Ids:
        delta = self._delta(messages)
        self.delta_origin = self._context.origins(delta, messages)
        self._buffer.append_delta(delta, self.delta_origin)
        self._prompt = self._buffer.ids
        return self._prompt

    def _delta(self, messages: Sequence[Message]) -> Ids:
        assert self._bridge is not None
        stream = np.concatenate([self._prompt, self._completion])
        extended = self._bridge.extend(self._prompt, self._completion, messages, self._tools)
        if extended is None or common_prefix(stream, extended) < len(stream):
            roles = ", ".join(str(message.get("role")) for message in messages) or "no"
            raise StrategyRefused(
                f"The renderer {self._bridge.name} cannot extend this stream by {roles} messages without changing the "
                "text before them. Choose tool_delta, or another strategy."
            )
        return extended[len(stream) :]
