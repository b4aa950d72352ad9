"""The strategies that keep messages and render them again: what the engine reads was encoded, not sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollouts.tito.prefix import common_prefix, merged_rows
from rollouts.tito.strategies.protocol import Context, StrategyRefused, Tools
from rollouts.tito.trajectory import NO_IDS, Floats, Ids, Mask, Message, Origin, Origins, Row, Step


@dataclass(frozen=True, eq=False)
class Piece:
    """Ids that were encoded alone, and which of them stand for what an assistant said."""

    ids: Ids
    loss_mask: Mask

    @classmethod
    def of(cls, ids: Ids, is_trained: bool) -> Piece:
        return cls(ids, np.full(len(ids), is_trained))


def joined(pieces: Sequence[Piece], n_steps: int) -> Row:
    """Pieces as one row. Nothing in it was sampled as it stands, so it has no log-probabilities."""
    ids = np.concatenate([piece.ids for piece in pieces]) if pieces else NO_IDS
    mask = np.concatenate([piece.loss_mask for piece in pieces]) if pieces else np.zeros(0, dtype=np.bool_)
    origin = np.where(mask, Origin.INSERTED, Origin.TEMPLATE).astype(np.uint8)
    first = int(np.argmax(mask)) if mask.any() else len(mask)
    origin[:first] = Origin.PROMPT
    return Row(ids, mask, None, origin, step_indices=tuple(range(n_steps)))


class Rendering(ABC):
    """Keeps the conversation as messages. Subclasses say how it becomes ids."""

    slug = ""
    rows_follow_from_steps = False
    continues_message = False
    delta_origin: Origins | None = None

    def __init__(self, context: Context) -> None:
        self._context = context
        self._messages: list[Message] = []
        self._tools: Tools = None
        self._kwargs: Mapping[str, Any] = {}
        self._n_steps = 0

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._messages, self._tools, self._kwargs = list(messages), tools, kwargs
        return self._prompt()

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        if reply is None:
            raise StrategyRefused(f"{self.slug} keeps messages, and this completion was parsed to none.")
        self._messages.append(reply)
        self._n_steps += 1

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._messages.extend(messages)
        return self._prompt()

    @abstractmethod
    def rows(self) -> list[Row]: ...

    def _prompt(self) -> Ids:
        return self._ids(self._messages, True)

    def _ids(self, messages: Sequence[Message], generation: bool) -> Ids:
        return self._context.renderer.render_ids(messages, self._tools, self._kwargs, generation)

    def _text(self, messages: Sequence[Message], generation: bool) -> str:
        return self._context.renderer.render_text(messages, self._tools, self._kwargs, generation)


class Retokenize(Rendering):
    """Render and encode everything each turn, and once more for the row; ``{% generation %}`` says what is trained."""

    slug = "retokenize"

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        template = getattr(self._context.renderer, "chat_template", "generation")
        # Where another template gives the rows, this one needs no tags.
        if self._context.rows is None and "generation" not in template.replace("add_generation_prompt", ""):
            raise StrategyRefused(
                "retokenize takes its loss mask from {% generation %} tags, and the chat template has none. Put them "
                "around what the assistant writes, or choose another strategy."
            )
        return super().begin(messages, tools, kwargs)

    def rows(self) -> list[Row]:
        render = getattr(self._context.renderer, "render_with_provenance", None)
        if render is None:
            raise StrategyRefused("retokenize needs a renderer that follows {% generation %} tags.")
        rendered = render(self._messages, self._tools, self._kwargs, False)
        ids = self._context.codec.encode(rendered.text)
        mask = spans_to_mask(self._context.codec.token_bytes(ids), rendered.text, rendered.tracked_spans)
        return [joined([Piece(ids, mask)], self._n_steps)]


def spans_to_mask(pieces: Sequence[bytes], text: str, spans: Sequence[tuple[int, int]]) -> Mask:
    """Which tokens overlap the character spans of the text that they encode."""
    stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    # A decoder that drops a leading space has one byte more than the text.
    ahead = max(0, (int(stops[-1]) if len(stops) else 0) - len(text.encode("utf-8", "surrogatepass")))
    starts = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
    mask = np.zeros(len(pieces), dtype=np.bool_)
    for first, last in spans:
        low = len(text[:first].encode("utf-8", "surrogatepass")) + ahead
        high = low + len(text[first:last].encode("utf-8", "surrogatepass"))
        mask |= (starts < high) & (stops > low)
    return mask


class MessageDelta(Rendering):
    """The difference of two text renders, each piece encoded alone (verl's first version)."""

    slug = "message_delta"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pieces: list[Piece] = []
        self._text_so_far = ""

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._messages, self._tools, self._kwargs = list(messages), tools, kwargs
        self._grow(True, is_trained=False)
        return self._prompt()

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        super().sampled(ids, logprobs, reply)
        self._grow(False, is_trained=True)

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._messages.extend(messages)
        self._grow(True, is_trained=False)
        return self._prompt()

    def rows(self) -> list[Row]:
        return [joined(self._pieces, self._n_steps)]

    def _prompt(self) -> Ids:
        return np.concatenate([piece.ids for piece in self._pieces])

    def _grow(self, generation: bool, is_trained: bool) -> None:
        text = self._text(self._messages, generation)
        if not text.startswith(self._text_so_far):
            raise StrategyRefused(
                "message_delta takes the difference of two renders, and the chat template changed what stood before "
                f"message {len(self._messages) - 1}. Repair the template or choose another strategy."
            )
        delta = text[len(self._text_so_far) :]
        self._text_so_far = text
        self._pieces.append(Piece.of(self._context.codec.encode(delta), is_trained))


class PerMessage(Rendering):
    """Encode each message alone and concatenate (hand-kept role formats)."""

    slug = "per_message"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._generation: Ids = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._messages, self._tools, self._kwargs = list(messages), tools, kwargs
        user = [{"role": "user", "content": "dummy"}]
        without = self._context.renderer.render_ids(user, None, kwargs, False)
        with_prompt = self._context.renderer.render_ids(user, None, kwargs, True)
        self._generation = with_prompt[common_prefix(without, with_prompt) :]
        return self._prompt()

    def rows(self) -> list[Row]:
        return [joined(self._all(), self._n_steps)]

    def _prompt(self) -> Ids:
        return np.concatenate([*(piece.ids for piece in self._all()), self._generation])

    def _all(self) -> list[Piece]:
        return [self._piece(index, message) for index, message in enumerate(self._messages)]

    def _piece(self, index: int, message: Message) -> Piece:
        tools = self._tools if index == 0 else None
        ids = self._context.remember(
            (self.slug, repr((message, tools, self._kwargs))),
            lambda: self._context.renderer.render_ids([message], tools, self._kwargs, False),
        )
        mask = np.zeros(len(ids), dtype=np.bool_)
        if message.get("role") == "assistant":
            start = common_prefix(ids, self._generation)
            stop = self._context.after_last(ids, self._context.stop_ids) or len(ids)
            mask[start:stop] = True
        return Piece(ids, mask)


class Reconcile(Rendering):
    """Render each turn; where the stream breaks, keep (CLEAN), rewrite the tail (REALIGN) or begin a row (FORK)."""

    slug = "reconcile"
    MOST_REALIGNED = 16
    """Ids of the last response that may be rewritten; a longer drift forks."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._done: list[Row] = []
        self._row = Row(NO_IDS, np.zeros(0, dtype=np.bool_), None, np.zeros(0, dtype=np.uint8))
        self._logprobs = np.zeros(0, dtype=np.float32)
        self._last_start = 0
        self.decisions: list[str] = []
        """One of ``clean``, ``realign``, ``fork`` for each prompt after the first."""

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        prompt = super().begin(messages, tools, kwargs)
        self._open(prompt)
        return prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._last_start = len(self._row.ids)
        self._extend(ids, True, Origin.SAMPLED, logprobs)
        super().sampled(ids, logprobs, reply)
        self._row = _with_step(self._row, self._n_steps - 1)

    def observe(self, messages: Sequence[Message]) -> Ids:
        prompt = super().observe(messages)
        shared = common_prefix(self._row.ids, prompt)
        lost = len(self._row.ids) - shared
        if lost == 0:
            self.decisions.append("clean")
        elif shared >= self._last_start and lost <= self.MOST_REALIGNED:
            self.decisions.append("realign")
            self._row = _cut(self._row, shared)
            self._logprobs = self._logprobs[:shared]
        else:
            self.decisions.append("fork")
            self._close()
            self._open(prompt)
            return prompt
        self._extend(prompt[shared:], False, Origin.TEMPLATE, None)
        return prompt

    def rows(self) -> list[Row]:
        return [*self._done, self._finished()]

    def _open(self, prompt: Ids) -> None:
        self._row = Row(NO_IDS, np.zeros(0, dtype=np.bool_), None, np.zeros(0, dtype=np.uint8))
        self._logprobs = np.zeros(0, dtype=np.float32)
        self._extend(prompt, False, Origin.PROMPT, None)

    def _close(self) -> None:
        self._done.append(self._finished())

    def _finished(self) -> Row:
        row = self._row
        logprobs = None if np.all(np.isnan(self._logprobs)) else self._logprobs
        return Row(row.ids, row.loss_mask, logprobs, row.origin, step_indices=row.step_indices)

    def _extend(self, ids: Ids, is_trained: bool, origin: Origin, logprobs: Floats | None) -> None:
        row = self._row
        assert row.origin is not None
        self._row = Row(
            np.concatenate([row.ids, ids]),
            np.concatenate([row.loss_mask, np.full(len(ids), is_trained)]),
            None,
            np.concatenate([row.origin, np.full(len(ids), origin, dtype=np.uint8)]),
            step_indices=row.step_indices,
        )
        nothing = np.full(len(ids), np.nan, dtype=np.float32)
        self._logprobs = np.concatenate([self._logprobs, nothing if logprobs is None else logprobs])


def _with_step(row: Row, index: int) -> Row:
    return Row(row.ids, row.loss_mask, None, row.origin, step_indices=(*row.step_indices, index))


def _cut(row: Row, stop: int) -> Row:
    assert row.origin is not None
    return Row(row.ids[:stop], row.loss_mask[:stop], None, row.origin[:stop], step_indices=row.step_indices)


class EosSplice(Rendering):
    """Render everything, then put the sampled stream in place of what lies before the last reply's EOS (NeMo RL)."""

    slug = "eos_splice"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._steps: list[Step] = []
        self._last_prompt: Ids = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._last_prompt = super().begin(messages, tools, kwargs)
        return self._last_prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._steps.append(Step(self._last_prompt, ids, logprobs))
        super().sampled(ids, logprobs, reply)

    def observe(self, messages: Sequence[Message]) -> Ids:
        stream = self._steps[-1].stream
        stops = self._context.stop_ids
        n_stops = int(np.count_nonzero(self._context.are(self._ids(self._messages, False), stops)))
        self._messages.extend(messages)
        full = self._ids(self._messages, True)
        places = np.flatnonzero(self._context.are(full, stops))
        if not n_stops or len(places) < n_stops:
            raise StrategyRefused(
                "eos_splice looks for the EOS that ends the last reply, and the chat template writes none there. "
                "Choose another strategy."
            )
        kept = stream[:-1] if len(stream) and int(stream[-1]) in stops else stream
        # The EOS itself comes from the template: the same id, unless the model stopped at another one.
        self._last_prompt = np.concatenate([kept, full[places[n_stops - 1] :]])
        return self._last_prompt

    def rows(self) -> list[Row]:
        return merged_rows(self._steps)
