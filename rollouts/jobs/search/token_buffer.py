"""The tokens of many trajectories in one array, each stored token once, and the place of every part of it.

A step that extends the step before lies directly behind it, so that an occurrence may span both. A step that leaves the
stream begins a block of its own, after the last tokens of what it shares. These are carried: an occurrence in them
alone was found before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids
from rollouts.store.models import StoredRow, StoredStep
from rollouts.store.token_arrays.reading import values_with_arrays

CONTEXT = 16  # Tokens on either side of a result that are told with it.


class Cell(NamedTuple):
    """A stretch of the buffer with one owner."""

    start: int  # Its first token in the buffer.
    offset: int  # The same token in the stream of its step or row.
    block: int  # The number of its block. The tokens of a block follow each other in one stream.
    trajectory: int  # The number of the trajectory among those of the buffer.
    row: int | None  # The row that holds it; None = no row does.
    step: int | None  # The step that brought it; None for a row with tokens of its own.
    carried: bool = False


class Spot(NamedTuple):
    """Where an occurrence lies."""

    trajectory: int
    row: int | None
    step: int | None
    start: int  # Offset in the row, or in the stream of the step where ``row`` is None.
    stop: int


class _Step(NamedTuple):
    number: int
    parent: int | None  # The position of the parent among the steps.
    shared: int
    extends: bool
    row: int
    ids: Ids


@dataclass(frozen=True, eq=False)
class TokenBuffer:
    """The tokens of some trajectories."""

    ids: Ids  # All tokens ``[n]``.
    cells: Sequence[Cell]  # In the order of the buffer.
    block_starts: Sequence[int]  # Where each block begins.
    first_of: Sequence[int]  # Where the tokens of each trajectory begin.
    own_rows: dict[tuple[int, int], Ids]  # (trajectory, row) -> the tokens of a row that has its own.
    starts: NDArray[np.int64]  # ``start`` of each cell.

    def trajectory_at(self, at: int) -> int:
        """The number of the trajectory that holds a token of the buffer."""
        return self.cells[self._cell(at)].trajectory

    def _cell(self, at: int) -> int:
        return int(self.starts.searchsorted(at, "right")) - 1

    def spot(self, start: int, stop: int) -> Spot | None:
        """Where the tokens ``[start, stop)`` of the buffer lie; None = nowhere, or where they were found before."""
        cell = self.cells[self._cell(stop - 1)]
        if cell.carried or start < self.block_starts[cell.block]:
            return None
        last = cell.offset + stop - cell.start
        spot = Spot(cell.trajectory, cell.row, cell.step, last - (stop - start), last)
        if cell.row is None and any(
            number == cell.trajectory and np.array_equal(row_ids[spot.start : spot.stop], self.ids[start:stop])
            for (number, _), row_ids in self.own_rows.items()
        ):
            return None  # a row of its own has the same tokens at the same place
        return spot

    def around(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """The tokens before and after an occurrence, in its stream."""
        block = self.cells[self._cell(stop - 1)].block
        low = self.block_starts[block]
        high = self.block_starts[block + 1] if block + 1 < len(self.block_starts) else len(self.ids)
        return self.ids[max(low, start - CONTEXT) : start], self.ids[stop : min(high, stop + CONTEXT)]


def of_row(ids: Ids, row: int = 0) -> TokenBuffer:
    """The buffer of one row."""
    return _Builder(0).row(0, row, ids).built([0])


def of_trajectories(keys: Sequence[int], carry: int) -> TokenBuffer:
    """The tokens of some trajectories, given by key. Two queries, and the segments where the arrays lie in files."""
    steps: dict[int, list[Any]] = {key: [] for key in keys}
    for values in values_with_arrays(
        StoredStep,
        keys,
        ("trajectory_id", "pk", "index", "parent_id", "shared_length", "parent_length", "row_index"),
        ("delta_ids", "completion_ids"),
    ):
        steps[values[0]].append(values[1:])
    rows: dict[int, list[Any]] = {key: [] for key in keys}
    for key, index, last_step, ids in values_with_arrays(
        StoredRow, keys, ("trajectory_id", "index", "last_step_id"), ("ids",),
    ):
        rows[key].append((index, last_step, ids))
    builder, firsts = _Builder(max(carry, CONTEXT)), list[int]()
    for number, key in enumerate(keys):
        firsts.append(builder.n)
        builder.steps(number, _steps(steps[key]), _followers(steps[key], rows[key]))
        for index, last_step, ids in rows[key]:
            if last_step is None and ids is not None:
                builder.row(number, index, ids)
    return builder.built(firsts)


def _steps(stored: Sequence[Any]) -> list[_Step]:
    positions: dict[int | None, int | None] = {None: None}
    steps = []
    for pk, index, parent, shared, parent_length, row, delta, completion in stored:
        ids = [part for part in (delta, completion) if part is not None]
        steps.append(
            _Step(index, positions.get(parent), shared, shared == parent_length, row, np.concatenate(ids or [_NONE]))
        )
        positions[pk] = len(steps) - 1
    return steps


_NONE = np.zeros(0, np.int32)


def _followers(stored: Sequence[Any], rows: Sequence[Any]) -> list[int | None]:
    """The row of each step; None where no row is the stream of a step after it."""
    if rows:
        follows = {index for index, last_step, _ in rows if last_step is not None}
        return [row if row in follows else None for _, _, _, _, _, row, *_ in stored]
    # A trajectory without stored rows is shown with those that its steps make so far.
    followers, at, open_rows = list[int | None](), dict[int, int](), 0
    for pk, _, parent, shared, parent_length, *_ in stored:
        row = at.pop(parent, None) if shared == parent_length else None
        if row is None:
            row, open_rows = open_rows, open_rows + 1
        at[pk] = row
        followers.append(row)
    return followers


class _Builder:
    """Puts a buffer together."""

    def __init__(self, carry: int) -> None:
        self._carry = carry
        self._parts: list[Ids] = []
        self._cells: list[Cell] = []
        self._blocks: list[int] = []
        self._own: dict[tuple[int, int], Ids] = {}
        self.n = 0

    def row(self, trajectory: int, index: int, ids: Ids) -> _Builder:
        """Append a row with tokens of its own."""
        self._own[trajectory, index] = ids
        if len(ids):
            self._open()
            self._put(ids, 0, trajectory, index, None)
        return self

    def steps(self, trajectory: int, steps: Sequence[_Step], rows: Sequence[int | None]) -> None:
        """Append the steps of a trajectory."""
        before: int | None = None
        for position, step in enumerate(steps):
            if not len(step.ids):
                continue
            if before is None or step.parent != before or not step.extends:
                self._open()
                tail = _tail(steps, step.parent, step.shared, self._carry)
                if len(tail):
                    self._put(tail, step.shared - len(tail), trajectory, rows[position], step.number, True)
            self._put(step.ids, step.shared, trajectory, rows[position], step.number)
            before = position

    def _open(self) -> None:
        self._blocks.append(self.n)

    def _put(
        self, ids: Ids, offset: int, trajectory: int, row: int | None, step: int | None, carried: bool = False
    ) -> None:
        self._cells.append(Cell(self.n, offset, len(self._blocks) - 1, trajectory, row, step, carried))
        self._parts.append(ids)
        self.n += len(ids)

    def built(self, firsts: Sequence[int]) -> TokenBuffer:
        """The buffer."""
        ids = np.concatenate(self._parts) if self._parts else _NONE
        starts = np.array([cell.start for cell in self._cells], np.int64)
        return TokenBuffer(ids, self._cells, self._blocks, firsts, self._own, starts)


def _tail(steps: Sequence[_Step], at: int | None, stop: int, n: int) -> Ids:
    """The last ``n`` tokens before ``stop`` of the stream of a step."""
    parts: list[Ids] = []
    while at is not None and n > 0 and stop > 0:
        step = steps[at]
        if stop > step.shared:
            part = step.ids[: stop - step.shared][-n:]
            parts.append(part)
            n -= len(part)
            stop = step.shared
        at = step.parent
    return np.concatenate(parts[::-1]) if parts else _NONE
