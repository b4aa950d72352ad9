"""The only module that turns model output into HTML. Model output is hostile text, so all of it is escaped.

``TokenPainter.window`` draws one element per token, for the few thousand tokens of a window. ``TokenPainter.blocks``
draws text in runs of equal state, for a whole row. Only text that ``text_html`` escaped stands between tags.

The class attribute of a token holds its state:

* ``o1``-``o4``: origin (none = prompt); ``m``: under the gradient; ``q0``-``q8``: class of the logprob
* ``x``: control token; ``k``: in the marked range; ``u``: unknown id
* ``f``: part of an error or a warning; ``fi``: part of an info finding alone; ``w``: trained, and not as it was sampled
* ``y``: part of a split character; ``yo`` opens and ``yc`` closes its bracket
* ``s``: origin, mask or finding differ from those of the token or run before it, so a screen reader is told

Where tokens are missing, an empty link stands at the end of the token before the gap, so that each child of a pane is a
token. CSS draws its words, so no copy holds them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Origin, Tokens
from rollout_inspector.text.html.text import (
    bytes_text_html, runs_right_to_left, split_fragments, text_html, visible_text
)
from rollout_inspector.text.tokenizers import ByteTable
from rollout_inspector.text.tokenizers.byte_table import special_tokens

LOGPROB_EDGES = (-0.01, -0.1, -0.3, -0.7, -1.4, -2.3, -4.6, -9.2)
"""Nats, from certain to surprising: about 99, 90, 74, 50, 25, 10, 1 and 0.01 %. Nine classes lie between."""

N_LOGPROB = len(LOGPROB_EDGES) + 2
NO_LOGPROB = N_LOGPROB - 1
MAX_MEMO = 200_000

# State bits, low to high: origin 3, mask 1, logprob class 4, fault 1, mark 1, note 1, foreign 1, said 1.
_MASK, _QUANTILE, _FAULT, _MARK, _NOTE, _FOREIGN, _SAID = 3, 4, 8, 9, 10, 11, 12
_STATE_BITS = 13
_SPOKEN = 7 | 1 << _MASK | 1 << _FAULT | 1 << _NOTE | 1 << _FOREIGN  # The bits that a screen reader is told of.


class Html(str):
    """HTML whose hostile parts are escaped. Templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


Ranges = Sequence[tuple[int, int]]
Block = tuple[int, int, Html]
"""Tokens ``[start, stop)`` of a row and their HTML. The browser draws a block only when the reader comes near."""


@dataclass(frozen=True)
class Marks:
    """What is drawn over the tokens of a row. All places are row offsets."""

    faults: Ranges = ()  # Places of errors and warnings. An empty one is drawn on the token after it.
    notes: Ranges = ()  # Places of info findings.
    foreign: Ranges = ()  # Tokens that were not sampled as they stand. They are marked where they are trained.
    origins_tell: bool = False  # Trained tokens with another origin than sampled are marked as foreign too.
    chosen: tuple[int, int] | None = None  # The range that the address marks.
    gaps: Mapping[int, str] = field(default_factory=dict)
    """Offset -> the HTML of :func:`gap_html`, drawn before the token there. The end of the row is an offset too."""
    classes: NDArray[np.int64] | None = None
    """Classes of the lens that is shown, of the whole row; None = those of the logprob."""


NO_MARKS = Marks()
MAX_LINE_BLOCKS = 8  # A line is at most so many times as long as a block before it is cut in its middle.
MAX_GAP_TEXT = 60


def _within(spans: Ranges, tokens: Tokens) -> Iterator[tuple[int, int]]:
    """The parts of row offsets that ``tokens`` hold. An empty place is that of the token after it."""
    for a, b in spans:
        low, high = max(a - tokens.start, 0), max(b, a + 1) - tokens.start
        if low < len(tokens) and high > 0:
            yield low, high


def foreign_tokens(tokens: Tokens, marks: Marks) -> NDArray[np.bool_]:
    """``[n]``: which tokens are trained, and not as they were sampled."""
    foreign = tokens.origin != Origin.SAMPLED if marks.origins_tell else np.zeros(len(tokens), dtype=np.bool_)
    for low, high in _within(marks.foreign, tokens):
        foreign[low:high] = True
    return foreign & tokens.loss_mask


def gap_html(words: str, text: str, url: str) -> str:
    """A link at a place where tokens are missing: ``words`` and the start of their hostile ``text``."""
    cut = visible_text(text[:MAX_GAP_TEXT]) + "…" * (len(text) > MAX_GAP_TEXT)
    label = escape(f"{words}: {cut}" if cut else words)
    return f'<a class=gap href="{escape(url)}" data-gap="{label}" aria-label="{label}. Show both sides."></a>'


def pin_html(number: int, title: str) -> str:
    """The place of a finding in a saved file: a link to its card, with its number."""
    label = escape(f"Finding {number}: {title}. Show its card.")
    return f'<a class=pin id=place-{number} href="#finding-{number}" data-n={number} aria-label="{label}"></a>'


def logprob_classes(logprobs: NDArray[np.float32] | None, n: int) -> NDArray[np.int64]:
    """Class 0 (certain) to 8 (least likely) of each logprob ``[n]``; ``NO_LOGPROB`` where there is none."""
    if logprobs is None:
        return np.full(n, NO_LOGPROB, dtype=np.int64)
    # digitize wants rising edges; -logprob is the surprise.
    classes = np.digitize(-np.nan_to_num(logprobs, nan=0.0), -np.asarray(LOGPROB_EDGES), right=True)
    return np.where(np.isnan(logprobs), NO_LOGPROB, classes)


def _state_classes(state: int) -> str:
    origin, quantile = state & 7, state >> _QUANTILE & 15
    finding = "f" if state >> _FAULT & 1 else "fi" if state >> _NOTE & 1 else ""
    flags = [name if state >> bit & 1 else "" for name, bit in (("k", _MARK), ("w", _FOREIGN), ("s", _SAID))]
    names = [f"o{origin}" if origin else "", "m" if state >> _MASK & 1 else "",
             f"q{quantile}" if quantile != NO_LOGPROB else "", finding, *flags]
    return " ".join(filter(None, names))


def _said(state: NDArray[np.int64]) -> NDArray[np.bool_]:
    """``[n]``: where what a screen reader is told differs from the token before. The first is told."""
    spoken = np.where(state >> _FAULT & 1, state & ~(1 << _NOTE), state) & _SPOKEN
    return np.diff(spoken, prepend=-1) != 0


def _class_attribute(names: str) -> str:
    return f' class="{names}"' if " " in names else f" class={names}" if names else ""


class TokenPainter:
    """Draws the tokens of one tokenizer and keeps the HTML. ``table`` None: ids are drawn as numbers."""

    def __init__(self, table: ByteTable | None) -> None:
        self.table = table
        self._memo: dict[int, str] = {}
        self._partial: dict[int, bytes] = {}  # Bytes of the ids whose own bytes are no UTF-8.
        self._stretches: dict[tuple[int, ...], list[str]] = {}

    def window(self, tokens: Tokens, marks: Marks = NO_MARKS, margin: tuple[int, int] = (0, 0)) -> Html:
        """One element per token, in order, with nothing between. ``margin``: tokens at each end that complete
        characters across the edge, and are not drawn."""
        whole = (tokens.start + margin[0], tokens.start + len(tokens) - margin[1])
        return self.windows(tokens, [whole], marks)[0]

    def windows(self, tokens: Tokens, spans: Ranges, marks: Marks = NO_MARKS) -> list[Html]:
        """:meth:`window` of each of the rising ``spans`` of row offsets, at least one, which do not overlap. Tokens
        outside of them complete characters, and are not drawn."""
        spans = [(a - tokens.start, b - tokens.start) for a, b in spans]
        starts, (first, end) = {a for a, b in spans if a < b}, (spans[0][0], spans[-1][1])
        state = self._states(tokens, marks, logprob=True)
        is_spoken = np.zeros(len(tokens), dtype=np.bool_)
        is_spoken[first:end] = _said(state[first:end])
        is_spoken[list(starts)] = True
        state |= is_spoken.astype(np.int64) << _SAID
        keys = (tokens.ids.astype(np.int64) << _STATE_BITS | state).tolist()
        memo = self._memo
        elements = list(map(memo.get, keys))
        if None in elements:
            memo = self._fill(keys)
            elements = list(map(memo.get, keys))
        if self._partial and None in elements:
            self._draw_split(keys, elements)
        for offset, gap in marks.gaps.items():
            at = offset - tokens.start
            if at in starts:  # no token of its window stands before it
                tag, _, text = (elements[at] or "").partition(">")  # no attribute of a token holds a ``>``
                elements[at] = f"{tag}>{gap}{text}"
            elif first < at <= end:
                text, _, tag = (elements[at - 1] or "").rpartition("</")
                elements[at - 1] = f"{text}{gap}</{tag}"
        return [Html("".join(elements[a:b])) for a, b in spans]  # type: ignore[arg-type]

    def _states(self, tokens: Tokens, marks: Marks, logprob: bool) -> NDArray[np.int64]:
        n = len(tokens)
        state = tokens.origin.astype(np.int64) & 7
        state |= tokens.loss_mask.astype(np.int64) << _MASK
        if marks.classes is None:
            state |= logprob_classes(tokens.logprobs if logprob else None, n) << _QUANTILE
        else:
            state |= marks.classes[tokens.start : tokens.stop] << _QUANTILE
        chosen = [marks.chosen] if marks.chosen else []
        for bit, spans in ((_FAULT, marks.faults), (_NOTE, marks.notes), (_MARK, chosen)):
            for low, high in _within(spans, tokens):
                state[low:high] |= 1 << bit
        state |= foreign_tokens(tokens, marks).astype(np.int64) << _FOREIGN
        return state

    def _fill(self, keys: list[int]) -> dict[int, str]:
        """Draw the new keys. Returns the memo that holds them, because another thread may start a new memo."""
        if len(self._memo) > MAX_MEMO:
            # Emptied, because a few windows fill it again. A new dict, because another thread may read the old one.
            self._memo = {}
        if len(self._stretches) > MAX_MEMO // 10:
            self._stretches = {}
        memo, new = self._memo, {}
        for key in set(keys):
            if key not in memo and (key >> _STATE_BITS) not in self._partial:
                new[key] = key >> _STATE_BITS
        if not new:
            return memo
        ids = np.fromiter(set(new.values()), dtype=np.int64)
        texts = dict(zip(ids.tolist(), self.pieces(ids), strict=True))
        for key, token_id in new.items():
            data = texts[token_id]
            names = _state_classes(key & (1 << _STATE_BITS) - 1)
            if not data:  # a hole in the vocabulary has no bytes, and no token is hidden
                memo[key] = f"<i{_class_attribute((names + ' u').strip())}>{token_id}</i>"
                continue
            try:
                text = data.decode()
            except UnicodeDecodeError:
                self._partial[token_id] = data
                continue
            if self.is_special(token_id):
                names = (names + " x").strip()
            memo[key] = f"<i{_class_attribute(names)}>{text_html(text, spaces=True)}</i>"
        return memo

    def pieces(self, ids: NDArray[Any]) -> list[bytes | None]:
        """The bytes of each id; None without a tokenizer, or for an id outside the vocabulary."""
        if self.table is None:
            return [None] * len(ids)
        is_known = (ids >= 0) & (ids < self.table.vocab_size)
        pieces = self.table.token_bytes(np.where(is_known, ids, 0).astype(np.int32))
        return [piece if is_inside else None for piece, is_inside in zip(pieces, is_known.tolist(), strict=True)]

    def special(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """``[n]``: which of ``ids`` ``[n]`` are control tokens. All False without a tokenizer."""
        return special_tokens(self.table, ids)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token. False without a tokenizer."""
        return bool(self.special(np.array([token_id]))[0])

    def runs_right_to_left(self, ids: NDArray[np.int32]) -> bool:
        """Whether some of the text of ids ``[n]`` runs from right to left. False without a tokenizer."""
        return self.table is not None and runs_right_to_left(self.table.join(ids))

    def _draw_split(self, keys: list[int], drawn: list[Any]) -> None:
        """Fill the gaps in ``drawn``: neighbouring tokens of a split character are drawn and kept together."""
        at = 0
        try:
            while True:
                at = stop = drawn.index(None, at)
                while stop < len(drawn) and drawn[stop] is None:
                    stop += 1
                stretch = tuple(keys[at:stop])
                parts = self._stretches.get(stretch)
                if parts is None:
                    parts = self._stretches[stretch] = self._split_html(stretch)
                drawn[at:stop] = parts
                at = stop
        except ValueError:
            return

    def _split_html(self, stretch: tuple[int, ...]) -> list[str]:
        pieces = [self._partial[key >> _STATE_BITS] for key in stretch]
        html = []
        for key, piece, (text, opens, closes) in zip(stretch, pieces, split_fragments(pieces), strict=True):
            names = [_state_classes(key & (1 << _STATE_BITS) - 1), "y", "yo" * opens, "yc" * closes]
            classes = " ".join(name for name in names if name)
            html.append(f'<i class="{classes}" data-x="{piece.hex(" ").upper()}">{text}</i>')
        return html

    def cuts(self, tokens: Tokens, parts: Ranges, size: int) -> list[list[int]]:
        """Row offsets between blocks of about ``size`` tokens of each part: never in a character, after a line."""
        return _block_cuts(_Text(self.table, tokens), parts, size)

    # Runs -------------------------------------------------------------------------------------------------------------

    def blocks(
        self, tokens: Tokens, marks: Marks = NO_MARKS, logprob: bool = False, size: int = 512,
        parts: Ranges | None = None,
    ) -> Iterator[Block]:
        """Text in runs of equal state, in blocks of about ``size`` tokens that never cut a character. ``logprob``: the
        class of the logprob is a part of the state, so the lens shows and there are more runs. ``parts``: row offsets
        that follow each other; each begins a block. None = all tokens are one part."""
        if not len(tokens):
            return
        first, end = tokens.start, tokens.start + len(tokens)
        parts = [(a, b) for a, b in ([(first, end)] if parts is None else parts) if a < b]
        state = self._states(tokens, marks, logprob)
        special = self.special(tokens.ids)
        text = _Text(self.table, tokens)
        cuts = _block_cuts(text, parts, size)
        # Each control token is its own run, so that two neighbours look like two.
        differs = (np.diff(state) != 0) | special[1:] | special[:-1]
        gaps = {offset: gap for offset, gap in marks.gaps.items() if first <= offset <= end}
        block_starts = {a for (a, _), inner_cuts in zip(parts, cuts, strict=True) for a in (a, *inner_cuts)}
        edges = {*(np.flatnonzero(differs) + first + 1).tolist(), *block_starts, *gaps}
        starts = np.asarray(sorted(at for at in edges if at < end), dtype=np.int64)
        labels = _said(state[starts - first]).tolist()
        html: list[str] = []
        begin = first
        for a, b, label in zip(starts.tolist(), [*starts[1:].tolist(), end], labels, strict=True):
            if a in block_starts and html:
                yield begin, a, Html("".join(html))
                begin, html = a, []
            at = a - first
            names = _state_classes(int(state[at]) | (label or a in block_starts) << _SAID) + " x" * bool(special[at])
            # At the start of a block there is no run before the gap.
            before, after = "" if html else gaps.get(a, ""), "" if b in block_starts else gaps.get(b, "")
            html.append(
                f"<span{_class_attribute(names.strip())} data-a={a}>{before}{text.run_html(a, b)}{after}</span>"
            )
        if html:
            yield begin, end, Html("".join(html))


class _Text:
    """The bytes of some tokens in one piece: a whole row makes no object for each of its tokens."""

    def __init__(self, table: ByteTable | None, tokens: Tokens) -> None:
        self.start, self.ids, n = tokens.start, tokens.ids, len(tokens)
        data, ends = table.joined(self.ids) if table is not None else (b"", np.zeros(n, np.int64))
        self.data, self.ends = data, np.append(0, ends)
        """All bytes, and ``[n + 1]``: 0, then where the bytes of each token end."""
        vocab_size = 0 if table is None else table.vocab_size
        self.unknown = np.flatnonzero((self.ids < 0) | (self.ids >= vocab_size))
        """The places of ids without bytes: outside the vocabulary, or all without a tokenizer. Rising."""

    def run_html(self, a: int, b: int) -> str:
        """The tokens with row offsets ``[a, b)`` as text; an id without bytes as a number."""
        a, b = a - self.start, b - self.start
        if not len(self.unknown):
            return bytes_text_html(self.data[self.ends[a] : self.ends[b]])
        html = []
        for place in self.unknown[slice(*self.unknown.searchsorted([a, b]))].tolist():
            html += [bytes_text_html(self.data[self.ends[a] : self.ends[place]]), f"<u>{int(self.ids[place])}</u>"]
            a = place + 1
        return "".join([*html, bytes_text_html(self.data[self.ends[a] : self.ends[b]])])


def _block_cuts(text: _Text, parts: Ranges, size: int) -> list[list[int]]:
    """The ends of the blocks of each part, except the last: after a line end, because a block breaks the line. Never in
    a character. Only a line of more than ``MAX_LINE_BLOCKS`` blocks is cut where it has no end."""
    lengths = np.diff(text.ends)
    data = np.frombuffer(text.data + b"\0", np.uint8)
    ends_line = ((lengths > 0) & (data[text.ends[1:] - 1] == ord("\n"))).tobytes()
    # A token that starts with a continuation byte belongs to the character before it.
    continues = ((lengths > 0) & (data[text.ends[:-1]] & 0xC0 == 0x80)).tobytes()
    cut_places = []
    for a, b in parts:
        cuts: list[int] = []
        at, end = a - text.start + size, b - text.start
        while at < end:
            line = ends_line.rfind(1, max(at - size // 4, at - size + 1), at)
            if line < 0:
                line = ends_line.find(1, at, min(at + MAX_LINE_BLOCKS * size, end))
            if line < 0 and end - at <= MAX_LINE_BLOCKS * size:
                break
            at = continues.find(0, at + MAX_LINE_BLOCKS * size if line < 0 else line + 1, end)
            if at < 0:
                break
            cuts.append(text.start + at)
            at += size
        cut_places.append(cuts)
    return cut_places


def comment_mark(names: list[str], url: str) -> str:
    """The sign of comments that begin at one token: an empty link to them. ``names``: the author of each."""
    n = len(names)
    people = ", ".join(dict.fromkeys(visible_text(name) for name in names))
    label = escape(f"{n} comments, by {people}" if n > 1 else f"Comment by {people}")
    return f'<a class="gap said" href="{escape(url)}" data-gap="{n}" aria-label="{label}. Read it."></a>'


@lru_cache(maxsize=16)
def painter_of(table: ByteTable | None) -> TokenPainter:
    """The painter of a tokenizer, which is kept."""
    return TokenPainter(table)
