"""Two token streams as the rows of one table: left is what the model sampled, equal stretches are folded.

Both sides of a line come from one group of an alignment, so that they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from django.utils.safestring import SafeString
from numpy.typing import NDArray

from inspector.token_html import TokenPainter, Tokens
from rollouts.tito.trajectory import Ids

CONTEXT = 24
"""Equal tokens shown on either side of a difference."""

FOLD_LEAST = 12
"""Fewer hidden tokens than this are shown instead."""

SITES_MOST = 200
SIDE_MOST = 2048
"""Tokens drawn of one side of one difference."""


class Group(Protocol):
    """A group of ``rollouts.tito.align``."""

    @property
    def left_start(self) -> int: ...
    @property
    def left_stop(self) -> int: ...
    @property
    def right_start(self) -> int: ...
    @property
    def right_stop(self) -> int: ...
    @property
    def equal(self) -> bool: ...


@dataclass(frozen=True)
class Line:
    """One line of the table: equal tokens, a fold that hides some, or a site where the sides differ."""

    kind: str
    """``equal``, ``fold``, ``site`` or ``new`` (the right side goes on)."""
    left_start: int
    left_stop: int
    right_start: int
    right_stop: int
    number: int = 0
    """Of a site, from 1."""
    left: SafeString | None = None
    right: SafeString | None = None
    left_ids: tuple[int, ...] = ()
    right_ids: tuple[int, ...] = ()

    @property
    def n_hidden(self) -> int:
        return self.left_stop - self.left_start

    @property
    def place(self) -> str:
        """Offsets on the left, and on the right where they differ."""
        left = _span(self.left_start, self.left_stop)
        right = _span(self.right_start, self.right_stop)
        return left if left == right else f"{left} | {right}"


def _span(a: int, b: int) -> str:
    return f"{a:,}" if b <= a + 1 else f"{a:,}-{b:,}"


@dataclass(frozen=True)
class Comparison:
    """Two streams side by side."""

    lines: tuple[Line, ...]
    n_sites: int
    n_left: int
    n_right: int
    left_changed: int
    """Left tokens that the right side lacks."""
    right_changed: int
    site_places: tuple[int, ...] = field(default=())
    """Left offset of each site."""

    @property
    def n_shown(self) -> int:
        return min(self.n_sites, SITES_MOST)


def merge(groups: Iterable[Group]) -> list[tuple[bool, int, int, int, int]]:
    """Groups with neighbours of one kind joined: (equal, left_start, left_stop, right_start, right_stop)."""
    merged: list[tuple[bool, int, int, int, int]] = []
    for group in groups:
        if merged and merged[-1][0] == group.equal:
            last = merged[-1]
            merged[-1] = (group.equal, last[1], group.left_stop, last[3], group.right_stop)
        else:
            merged.append((group.equal, group.left_start, group.left_stop, group.right_start, group.right_stop))
    return merged


def compare(
    left: Ids, right: Ids, groups: Iterable[Group], painter: TokenPainter, left_base: int = 0, right_base: int = 0,
    context: int = CONTEXT, tail_is_new: bool = False, states: tuple[Tokens, Tokens] | None = None,
) -> Comparison:  # fmt: skip
    """The table of an alignment. ``left_base`` and ``right_base`` are the offsets of the first tokens.

    ``tail_is_new``: what the right side has behind the end of the left is no difference, it goes on. ``states``: both
    sides with origins and masks, starting at 0, where these are to be drawn.
    """
    merged = merge(groups)
    lines: list[Line] = []
    n_sites = left_changed = right_changed = 0
    places = []

    def line(kind: str, a: int, b: int, c: int, d: int, number: int = 0) -> Line:
        base = (left_base + a, left_base + b, right_base + c, right_base + d)
        if kind == "fold":
            return Line(kind, *base)
        b, d = min(b, a + SIDE_MOST), min(d, c + SIDE_MOST)
        drawn = (
            (plain_tokens(left[a:b]), plain_tokens(right[c:d]))
            if states is None
            else (states[0].slice(a, b), states[1].slice(c, d))
        )
        ids = (tuple(drawn[0].ids.tolist()), tuple(drawn[1].ids.tolist())) if kind == "site" else ((), ())
        return Line(kind, *base, number, painter.window(drawn[0]), painter.window(drawn[1]), *ids)

    for i, (equal, a, b, c, d) in enumerate(merged):
        if not equal and tail_is_new and a == b == len(left):
            lines.append(line("new", a, b, c, d))
            continue
        if not equal:
            n_sites += 1
            left_changed += b - a
            right_changed += d - c
            places.append(left_base + a)
            if n_sites <= SITES_MOST:
                lines.append(line("site", a, b, c, d, n_sites))
            continue
        if n_sites > SITES_MOST:
            continue
        before = 0 if i == 0 else context
        after = 0 if i == len(merged) - 1 else context
        if b - a <= before + after + FOLD_LEAST:
            lines.append(line("equal", a, b, c, d))
            continue
        if before:
            lines.append(line("equal", a, a + before, c, c + before))
        lines.append(line("fold", a + before, b - after, c + before, d - after))
        if after:
            lines.append(line("equal", b - after, b, d - after, d))
    return Comparison(
        tuple(lines), n_sites, len(left), len(right), left_changed, right_changed, tuple(places[:SITES_MOST])
    )


def plain_tokens(ids: NDArray[np.int32]) -> Tokens:
    """Ids without any state."""
    n = len(ids)
    return Tokens(0, ids, np.zeros(n, np.uint8), np.zeros(n, np.bool_))


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The sites, without the HTML."""
    sites = [
        {
            "left_start": line.left_start, "left_stop": line.left_stop,
            "right_start": line.right_start, "right_stop": line.right_stop,
            "left_ids": list(line.left_ids), "right_ids": list(line.right_ids),
        }
        for line in comparison.lines if line.kind == "site"
    ]  # fmt: skip
    return {
        "n_left": comparison.n_left,
        "n_right": comparison.n_right,
        "n_sites": comparison.n_sites,
        "left_changed": comparison.left_changed,
        "right_changed": comparison.right_changed,
        "sites": sites,
    }


def with_texts(report: dict[str, Any], painter: TokenPainter) -> dict[str, Any]:
    """Adds ``left_text`` and ``right_text`` to each site where the tokenizer is known."""
    if painter.table is not None:
        for site in report["sites"]:
            for side in ("left", "right"):
                site[f"{side}_text"] = text_of(painter, np.asarray(site[f"{side}_ids"], dtype=np.int32))
    return report


def text_of(painter: TokenPainter, ids: Ids) -> str:
    """Ids decoded; bytes that are no text become U+FFFD."""
    return b"".join(painter.table.token_bytes(ids)).decode("utf-8", "replace") if painter.table is not None else ""


def first_places(places: Sequence[int], most: int = 5) -> str:
    """Where the differences begin, as a sentence: a few offsets and the number of the others."""
    named = ", ".join(f"{place:,}" for place in places[:most])
    more = f" and {len(places) - most:,} more" if len(places) > most else ""
    return f"At token{'s' * (len(places) > 1)} {named}{more}."
