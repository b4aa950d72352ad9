"""The pane of the tokens page: the turns, and the part of each turn, that are drawn for a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from inspector.html.tokens import Block, Marks, TokenPainter, Tokens, foreign_tokens
from inspector.trajectories import lenses
from inspector.trajectories.place import WINDOW, PagePlace, View
from inspector.trajectories.turns import Turn

RUNS_BYTES = 2_000_000
"""The most HTML of one response of the run view. The browser fetches the rest as the reader scrolls."""

BLOCK = 128
"""Tokens of a block in the token view. The browser lays out a block only when the reader comes near."""

MARGIN = 3
"""Tokens that are read beyond each edge: a character of four bytes reaches at most three tokens over an edge."""


@dataclass(frozen=True)
class TurnSection:
    """The part of one turn that is shown."""

    turn: Turn
    start: int
    stop: int
    url: str
    """The address of the turn in the token view."""
    blocks: tuple[Block, ...] = ()
    n_foreign: int = 0
    """Tokens of the part that are trained, and not as they were sampled."""

    @property
    def is_continued(self) -> bool:
        return self.start > self.turn.start

    @property
    def tokens_text(self) -> str:
        return f"tokens {self.turn.start:,}-{self.turn.stop:,}" if self.turn.n_tokens else "no tokens"

    @property
    def trained_text(self) -> str:
        n = self.turn.n_trained
        if n is None:
            return ""
        words = "all trained" if n and n == self.turn.n_tokens else f"{n:,} trained" if n else "not trained"
        return words + (f", {self.n_foreign:,} not as sampled" if self.n_foreign else "")

    @property
    def findings_text(self) -> str:
        n = len(self.turn.findings)
        return f"{n} finding{'s' * (n != 1)}" if n else ""


@dataclass(frozen=True)
class Reader:
    """What the pane shows: row offsets ``[start, stop)`` in sections, and the addresses of the windows around them."""

    sections: tuple[TurnSection, ...]
    start: int
    stop: int
    n_tokens: int
    previous_url: str = ""
    next_url: str = ""
    more_url: str = ""
    """In the run view: the address of the part that did not fit into this response."""
    lens_notes: dict[str, str] = field(default_factory=dict)
    """Lens -> why it colours none of these tokens."""


def wanted_range(place: PagePlace, n_tokens: int) -> tuple[int, int]:
    """The row offsets ``[start, stop)`` to read for a place, margins included."""
    return max(place.window - MARGIN, 0), min(place.window + place.size + MARGIN, n_tokens)


def build_reader(
    place: PagePlace, turns: Sequence[Turn], tokens: Tokens, n_tokens: int, painter: TokenPainter, marks: Marks
) -> Reader:
    """``tokens`` are those of :func:`wanted_range`. The window limits time and size, not the row."""
    start, stop = place.window, min(place.window + place.size, n_tokens)
    lens = lenses.find(place.lens)
    splits = lens is not None and lens.splits_runs
    sections = []
    written = 0
    for turn in turns:
        a, b = max(turn.start, start), min(turn.stop, stop)
        if b < a or (b == a and turn.n_tokens) or (turn.start == turn.stop and not start <= turn.start <= stop):
            continue
        url = place.marked(turn.start, turn.stop, view=View.TOKENS)
        # A gap at the end of a turn is that of the next turn, except at the end of the row.
        gaps = {offset: gap for offset, gap in marks.gaps.items() if a <= offset < b or offset == b == n_tokens}
        here = replace(marks, gaps=gaps)
        n_foreign = int(foreign_tokens(tokens.slice(a, b), marks).sum())
        if place.view == View.TOKENS:
            drawn = []
            for low, high in pairwise([a, *painter.cuts(tokens.slice(a, b), BLOCK), b]):
                left, right = min(MARGIN, low - tokens.start), min(MARGIN, tokens.start + len(tokens) - high)
                part = tokens.slice(low - left, high + right)
                held = {at: gap for at, gap in gaps.items() if low <= at < high or at == high == b}
                drawn.append(Block(low, high, painter.window(part, replace(marks, gaps=held), margin=(left, right))))
            sections.append(TurnSection(turn, a, b, url, tuple(drawn), n_foreign))
            continue
        if written > RUNS_BYTES:
            stop = a
            break
        blocks = painter.blocks(tokens.slice(a, b), here, logprob=splits)
        kept = 0
        for block in blocks:
            written += len(block.html.encode())
            kept += 1
            if written > RUNS_BYTES:
                break
        b = blocks[kept - 1].stop if blocks else b
        sections.append(TurnSection(turn, a, b, url, blocks=tuple(blocks[:kept]), n_foreign=n_foreign))
        if kept < len(blocks):
            stop = b
            break
    shown = "in this window" if place.view == View.TOKENS else "in this row"
    links: dict[str, str] = {}
    if start > 0:
        before = max(start - WINDOW, 0) if place.view == View.TOKENS else 0
        links["previous_url"] = place.query(window=before, mark=None)
    if stop < n_tokens:
        key = "next_url" if place.view == View.TOKENS else "more_url"
        links[key] = place.query(window=stop, mark=None)
    return Reader(tuple(sections), start, stop, n_tokens, lens_notes=lenses.notes(tokens, shown), **links)
