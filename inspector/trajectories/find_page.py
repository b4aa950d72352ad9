"""Text in a whole row: every place of it, wherever the page is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.tokens import page_queries as data
from inspector.web.twins import Page
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories.trajectory_parts import RowSummary

MAX_PLACES = 2000
"""The most places that one answer names."""

MAX_WANTED = 1000
"""Characters of the longest text that is looked for."""


@dataclass(frozen=True)
class FoundPlaces(Page):
    """Where a text stands in a row."""

    row: int
    """The index of the row."""
    wanted: str
    """The text. Capital ASCII letters are taken for small ones, in the row too."""
    n: int
    """How many places there are. Two places never share a byte."""
    places: list[tuple[int, int]]
    """Tokens ``[start, stop)`` that hold each place; of many the first 2,000."""
    missing: str
    """Why nothing can be found; empty when the row was searched."""


def find_text(table: ByteTable, ids: NDArray[np.int32], wanted: str) -> tuple[int, list[tuple[int, int]]]:
    """The number of places of ``wanted`` in the text of ``ids`` ``[n]``, and the tokens of the first ``MAX_PLACES``."""
    text, ends = table.joined(ids)
    text, needle = text.lower(), wanted.encode().lower()
    places: list[int] = []
    at = text.find(needle)
    while at >= 0 and len(places) < MAX_PLACES:
        places.append(at)
        at = text.find(needle, at + len(needle))
    n = len(places) + (text.count(needle, at) if at >= 0 else 0)
    first = np.searchsorted(ends, places, side="right")
    last = np.searchsorted(ends, [place + len(needle) - 1 for place in places], side="right")
    return n, [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]


def find_page(trajectory: StoredTrajectory, row: RowSummary | None, text: str) -> FoundPlaces:
    """Every place of a text in a row. Reads the ids of the whole row."""
    text = text[:MAX_WANTED]
    if row is None:
        return FoundPlaces(0, text, 0, [], "There is no row.")
    table, missing = data.table_of(trajectory.run.tokenizer)
    if table is None or not text:
        return FoundPlaces(row.index, text, 0, [], missing or "No text was named: add ?q=TEXT.")
    tokens = data.read_tokens(trajectory, row, 0, row.n_tokens)
    n, places = find_text(table, tokens.ids, text)
    return FoundPlaces(row.index, text, n, places, "")
