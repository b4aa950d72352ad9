"""The strategies that keep messages and render them again. The engine reads encoded text, not sampled ids."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.buffer import Buffer
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.strategies.protocol import (
    Context, ConversationSegment, KeepsSteps, Strategy, StrategyRefused, Tools
)
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Message, Origin, Origins, Row


class RenderedPiece(NamedTuple):
    """Ids that were encoded alone, and the range ``[start, stop)`` of them that is an assistant's text."""

    ids: Ids
    start: int = 0
    stop: int = 0


def joined(pieces: Sequence[RenderedPiece], n_steps: int) -> Row:
    """Pieces as one row."""
    ids = np.concatenate([NO_IDS, *(piece.ids for piece in pieces)])
    mask: Mask = np.zeros(len(ids), dtype=np.bool_)
    place = 0
    for piece in pieces:
        mask[place + piece.start : place + piece.stop] = True
        place += len(piece.ids)
    return row_of_text(ids, mask, n_steps)


def row_of_text(ids: Ids, mask: Mask, n_steps: int) -> Row:
    """A row without verbatim sampled ids: it has no log-probabilities."""
    origin: Origins = np.where(mask, _INSERTED, _TEMPLATE)
    origin[: int(mask.argmax()) if mask.any() else len(mask)] = int(Origin.PROMPT)
    return Row(ids, mask, None, origin, step_indices=tuple(range(n_steps)))


_INSERTED, _TEMPLATE = np.uint8(Origin.INSERTED), np.uint8(Origin.TEMPLATE)


class Rendering(Strategy):
    """Keeps the conversation as messages. Subclasses turn them into ids."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._messages: list[Message] = []
        self._tools: Tools = None
        self._kwargs: Mapping[str, Any] = {}
        self._n_steps = 0

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._messages, self._tools, self._kwargs = list(messages), tools, kwargs
        return self._prompt()

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        if reply is None:
            raise StrategyRefused(f"{self.slug} keeps messages, and this completion has no parsed message.")
        self._messages.append(reply)
        self._n_steps += 1

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._messages.extend(messages)
        return self._prompt()

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        yield from segment.prompt_asks

    def _prompt(self) -> Ids:
        return self._ids(self._messages, True)

    def _ids(self, messages: Sequence[Message], generation: bool) -> Ids:
        return self._context.renderer.render_ids(Conversation(messages, self._tools, self._kwargs, generation))

    def _text(self, messages: Sequence[Message], generation: bool) -> str:
        return self._context.renderer.render_text(Conversation(messages, self._tools, self._kwargs, generation))


_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Retokenize(Rendering):
    """Renders and encodes everything at each turn and for the row. ``{% generation %}`` tags mark what is trained."""

    slug = "retokenize"
    about = (
        "Only text is kept: the whole conversation is rendered and encoded again at every turn and for the row, so "
        "the trainer may see ids that were never sampled."
    )

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        # If another template makes the rows, this one needs no tags.
        if self._context.rows is None and not self._has_tags():
            raise StrategyRefused(
                "retokenize takes its loss mask from {% generation %} tags, and the chat template has none. Put them "
                "around what the assistant writes, or choose another strategy."
            )
        return super().begin(messages, tools, kwargs)

    def rows(self) -> list[Row]:
        render = getattr(self._context.renderer, "render_tracked", None)
        if render is None:
            raise StrategyRefused("retokenize needs a renderer that follows {% generation %} tags.")
        text, spans = render(Conversation(self._messages, self._tools, self._kwargs, False))
        ids = self._context.encode(text)
        _, stops = self._context.codec.joined_bytes(ids)
        return [row_of_text(ids, spans_to_mask(stops, text, spans), self._n_steps)]

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        if self._context.rows is not None:
            yield from super().foresee(segment)
        elif self._has_tags():
            yield from super().foresee(segment)
            yield from segment.reply_asks[-1:]

    def _has_tags(self) -> bool:
        return _TAG.search(getattr(self._context.renderer, "chat_template", "{% generation %}")) is not None


def spans_to_mask(stops: NDArray[np.int64], text: str, spans: Sequence[tuple[int, int]]) -> Mask:
    """Which tokens overlap the character spans ``[start, stop)`` of their text. ``stops``: their end bytes."""
    mask: Mask = np.zeros(len(stops), dtype=np.bool_)
    starts = np.concatenate([[0], stops[:-1]]) if len(stops) else stops
    # A decoder that drops a leading space leaves the tokens one byte longer than the text.
    n_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    extra = max(0, (int(stops[-1]) if len(stops) else 0) - n_bytes)
    places = [place for span in spans for place in span]
    if n_bytes != len(text):
        places = [len(text[:place].encode("utf-8", "surrogatepass")) for place in places]
    boundaries = np.array(places, dtype=np.int64).reshape(-1, 2) + extra
    firsts = stops.searchsorted(boundaries[:, 0], side="right")
    lasts = starts.searchsorted(boundaries[:, 1], side="left")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        mask[first:last] = True
    return mask


class MessageDelta(Rendering):
    """The difference of two text renders. Each piece is encoded alone (verl's first version)."""

    slug = "message_delta"
    about = (
        "New messages are the difference of two renders of the whole conversation as text, and each piece is encoded "
        "alone."
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._pieces: list[RenderedPiece] = []
        self._so_far: Ids = NO_IDS
        self._n_joined = 0
        self._text_so_far = ""

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        super().sampled(ids, logprobs, reply)
        self._grow(False, is_trained=True)

    def rows(self) -> list[Row]:
        return [joined(self._pieces, self._n_steps)]

    def _prompt(self) -> Ids:
        self._grow(True, is_trained=False)
        new = [piece.ids for piece in self._pieces[self._n_joined :]]
        self._so_far = np.concatenate([self._so_far, *new])
        self._n_joined += len(new)
        return self._so_far

    def _grow(self, generation: bool, is_trained: bool) -> None:
        text = self._text(self._messages, generation)
        if not text.startswith(self._text_so_far):
            raise StrategyRefused(
                "message_delta takes the difference of two renders, and the chat template changed the text before "
                f"message {len(self._messages) - 1}. Repair the template or choose another strategy."
            )
        delta = text[len(self._text_so_far) :]
        self._text_so_far = text
        ids = self._context.encode(delta)
        self._pieces.append(RenderedPiece(ids, 0, len(ids) if is_trained else 0))

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        yield from segment.prompt_asks
        yield from segment.reply_asks


DUMMY: tuple[Message, ...] = ({"role": "user", "content": "dummy"},)


class PerMessage(Rendering):
    """Encodes each message alone and joins the ids (hand-written role formats)."""

    slug = "per_message"
    about = "Each message is rendered and encoded alone, and the ids are joined."

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._generation: Ids = NO_IDS
        self._pieces: list[RenderedPiece] = []
        self._so_far: Ids = NO_IDS
        self._asked = ""

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._messages, self._tools, self._kwargs = list(messages), tools, kwargs
        self._asked = self._context.repr_of(kwargs)
        self._generation = self._context.cache.remember((self.slug, "generation", self._asked), self._generation_prompt)
        return self._prompt()

    def _generation_prompt(self) -> Ids:
        without = self._context.renderer.render_ids(Conversation(DUMMY, None, self._kwargs, False))
        with_prompt = self._context.renderer.render_ids(Conversation(DUMMY, None, self._kwargs, True))
        return with_prompt[common_prefix(without, with_prompt) :]

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        self._asked = self._context.repr_of(segment.kwargs)
        for index, message in enumerate(segment.whole):
            tools = segment.tools if index == 0 else None
            if not self._context.cache.remembers(self._key(message, tools)):
                yield Conversation([message], tools, segment.kwargs, False)

    def rows(self) -> list[Row]:
        return [joined(self._all(), self._n_steps)]

    def _prompt(self) -> Ids:
        self._all()
        return np.concatenate([self._so_far, self._generation])

    def _all(self) -> list[RenderedPiece]:
        places = range(len(self._pieces), len(self._messages))
        new = [self._piece(self._messages[index], self._tools if index == 0 else None) for index in places]
        self._pieces += new
        self._so_far = np.concatenate([self._so_far, *(piece.ids for piece in new)])
        return self._pieces

    def _key(self, message: Message, tools: Tools) -> Any:
        repr_of = self._context.repr_of
        return self.slug, repr_of(message), None if tools is None else repr_of(tools), self._asked

    def _piece(self, message: Message, tools: Tools) -> RenderedPiece:
        return self._context.cache.remember(self._key(message, tools), lambda: self._encoded(message, tools))

    def _encoded(self, message: Message, tools: Tools) -> RenderedPiece:
        ids = self._context.renderer.render_ids(Conversation([message], tools, self._kwargs, False))
        if message.get("role") != "assistant":
            return RenderedPiece(ids)
        stop = self._context.after_last(ids, self._context.stop_ids) or len(ids)
        header = self._generation.tobytes()
        # A default system text may stand before the header. Neither is the assistant's.
        place = ids.tobytes().find(header) if header else 0
        start = place // ids.itemsize + len(self._generation) if place >= 0 and not place % ids.itemsize else (
            common_prefix(ids, self._generation)
        )
        return RenderedPiece(ids, min(start, stop), stop)


class Reconcile(Rendering):
    """Renders each turn. Where the stream breaks: keep (CLEAN), rewrite the tail (REALIGN) or begin a row (FORK)."""

    slug = "reconcile"
    parameters = {"fork_threshold": 1024}
    """From so many drifted ids on a row is opened; fewer are realigned. The default of TRL and slime."""
    about = (
        "The conversation is rendered again at every turn. Where the stream breaks, a drift of fewer than "
        f"{parameters['fork_threshold']:,} tokens in the last reply is accepted with mask 0, and any other opens a new "
        "row."
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._done: list[Row] = []
        self._buffer = Buffer()
        self._step_indices: list[int] = []
        self._last_start = 0
        self.decisions: list[str] = []  # One of ``clean``, ``realign``, ``fork`` for each prompt after the first.

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        prompt = super().begin(messages, tools, kwargs)
        self._buffer.append_prompt(prompt)
        return prompt

    def fork(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        """Open a row for a conversation with a rewritten history. The earlier rows stay."""
        self._close()
        return self.begin(messages, tools, kwargs)

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._last_start = len(self._buffer)
        self._buffer.append_sampled(ids, logprobs)
        super().sampled(ids, logprobs, reply)
        self._step_indices.append(self._n_steps - 1)

    def observe(self, messages: Sequence[Message]) -> Ids:
        prompt = super().observe(messages)
        shared = common_prefix(self._buffer.ids, prompt)
        lost = len(self._buffer) - shared
        if lost == 0:
            self.decisions.append("clean")
        elif shared >= self._last_start and lost < self.parameters["fork_threshold"]:
            self.decisions.append("realign")
            self._buffer.cut(shared)
        else:
            self._close()
            self._buffer.append_prompt(prompt)
            return prompt
        self._buffer.append_delta(prompt[shared:])
        return prompt

    def rows(self) -> list[Row]:
        return [*self._done, self._row()]

    def _close(self) -> None:
        self.decisions.append("fork")
        self._done.append(self._row())
        self._buffer, self._step_indices = Buffer(), []

    def _row(self) -> Row:
        row = self._buffer.to_row(self._step_indices)
        return replace(row, logprobs=None) if row.logprobs is not None and np.isnan(row.logprobs).all() else row


class RenderedPrompts(KeepsSteps, Rendering):
    """What an engine reads that is asked for messages: each prompt is rendered. Rows follow from the steps. Nobody
    launches it, so it is in no registry: it tells what a recorded trajectory becomes under another template."""

    slug = "rendered"

    def fork(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        """Go on with a conversation with a rewritten history. The earlier steps stay."""
        return self.begin(messages, tools, kwargs)


class EosSplice(KeepsSteps, Rendering):
    """Renders everything, then puts the sampled stream in place of the ids before the last reply's EOS (NeMo RL)."""

    slug = "eos_splice"
    about = (
        "The whole conversation is rendered again at every turn, and everything before its last end-of-turn token is "
        "replaced by the earlier stream."
    )

    def _prompt(self) -> Ids:
        return super()._prompt() if self.recorded_prompt is None else self.recorded_prompt

    def observe(self, messages: Sequence[Message]) -> Ids:
        stream = self._steps[-1].stream
        stops = self._context.stop_ids
        n_stops = int(np.count_nonzero(self._context.are(self._ids(self._messages, False), stops)))
        self._messages.extend(messages)
        full = self._ids(self._messages, True)
        places = self._context.are(full, stops).nonzero()[0]
        if not n_stops or len(places) < n_stops:
            raise StrategyRefused(
                "eos_splice needs the EOS that ends the last reply, and the chat template writes none there. "
                "Choose another strategy."
            )
        unstopped = stream[:-1] if len(stream) and int(stream[-1]) in stops else stream
        # The template writes the EOS. It is the same id, unless the model stopped at another one.
        self._last_prompt = np.concatenate([unstopped, full[places[n_stops - 1] :]])
        return self._last_prompt

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        yield from segment.prompt_asks[segment.recorded_prompt is not None :]
        yield from segment.reply_asks[: len(segment.turns) - 1]
