"""The pane of the tokens page: the turns, and the part of each turn, that are drawn for a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np

from inspector.html.tokens import Block, Marks, TokenPainter, Tokens, foreign_tokens
from inspector.trajectories.place import WINDOW, PagePlace, View
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.turns import Turn
from rollout_inspector.streams.figures import trained_words

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
        return trained_words(n, self.turn.n_tokens) + (f", {self.n_foreign:,} not as sampled" if self.n_foreign else "")

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


Part = tuple[Turn, int, int]
"""A turn, and the row offsets ``[start, stop)`` of it that are drawn."""


def build_reader(
    place: PagePlace, turns: Sequence[Turn], tokens: Tokens, n_tokens: int, painter: TokenPainter, marks: Marks
) -> Reader:
    """``tokens`` are those of :func:`wanted_range`. The window limits time and size, not the row."""
    start, stop = place.window, min(place.window + place.size, n_tokens)
    turn_ranges = [(turn, max(turn.start, start), min(turn.stop, stop)) for turn in turns]
    parts: list[Part] = [(turn, a, b) for turn, a, b in turn_ranges if a < b or (a == b and not turn.n_tokens)]
    # A gap behind the last token is drawn at the end of the row alone.
    marks = replace(marks, gaps={at: gap for at, gap in marks.gaps.items() if start <= at < stop or at == n_tokens})
    if place.view == View.TOKENS:
        turn_blocks = _token_blocks(parts, tokens, painter, marks)
    else:
        lens = lenses.find(place.lens)
        turn_blocks = _run_blocks(
            parts, tokens.slice(start, stop), painter, marks, lens is not None and lens.splits_runs
        )
    foreign = np.concatenate([[0], np.cumsum(foreign_tokens(tokens, marks))])
    turn_url = place.marked_template(view=View.TOKENS)
    sections = []
    for (turn, a, b), blocks in zip(parts, turn_blocks, strict=False):
        shown_to = blocks[-1].stop if blocks else b
        n_foreign = int(foreign[shown_to - tokens.start] - foreign[a - tokens.start])
        url = turn_url.format(turn.start, max(turn.stop, turn.start + 1))
        sections.append(TurnSection(turn, a, shown_to, url, tuple(blocks), n_foreign))
    if len(turn_blocks) < len(parts) or (sections and sections[-1].stop < parts[-1][2]):
        stop = sections[-1].stop  # the rest did not fit into this response
    where = "in this window" if place.view == View.TOKENS else "in this row"
    links: dict[str, str] = {}
    if start > 0:
        before = max(start - WINDOW, 0) if place.view == View.TOKENS else 0
        links["previous_url"] = place.query(window=before, mark=None)
    if stop < n_tokens:
        key = "next_url" if place.view == View.TOKENS else "more_url"
        links[key] = place.query(window=stop, mark=None)
    return Reader(tuple(sections), start, stop, n_tokens, lens_notes=lenses.notes(tokens, where), **links)


def _token_blocks(parts: Sequence[Part], tokens: Tokens, painter: TokenPainter, marks: Marks) -> list[list[Block]]:
    """The blocks of each part, an element per token."""
    spans = [(a, b) for _, a, b in parts]
    cuts = painter.cuts(tokens, spans, BLOCK)
    blocks = [list(pairwise([a, *block_cuts, b])) for (a, b), block_cuts in zip(spans, cuts, strict=True)]
    html = iter(painter.windows(tokens, list(chain(*blocks)), marks) if blocks else ())
    return [[Block(a, b, next(html)) for a, b in block_cuts] for block_cuts in blocks]


def _run_blocks(
    parts: Sequence[Part], tokens: Tokens, painter: TokenPainter, marks: Marks, splits: bool
) -> list[list[Block]]:
    """The blocks of the first parts, text in runs, until ``RUNS_BYTES`` are written."""
    blocks_of_parts: list[list[Block]] = []
    blocks = painter.blocks(tokens, marks, splits, parts=[(a, b) for _, a, b in parts])
    written = 0
    for _, a, b in parts:
        blocks_of_parts.append([])
        while a < b:
            block = next(blocks)
            blocks_of_parts[-1].append(block)
            a, written = block.stop, written + len(block.html.encode())
            if written > RUNS_BYTES:
                return blocks_of_parts
    return blocks_of_parts
