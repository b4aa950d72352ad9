"""Reads the arrays of steps and rows from wherever they lie. A query that says where the arrays are also reads those
that are in the database: one statement sees one state, so that arrays may be moved meanwhile. A segment stays readable
for a while after its arrays have gone elsewhere."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from django.db.models import FilteredRelation, Q, QuerySet

from rollout_inspector.streams.coding import StepExtent, stream_pieces
from rollout_inspector.streams.trajectory import NO_IDS, Ids
from rollouts.store.models import Fork, RowTokens, StepTokens, StoredRow, StoredStep, StoredTrajectory
from rollouts.store.token_arrays.items import ALTERNATIVES, COLUMNS, ROW_ARRAYS, STEP_ARRAYS

Where = tuple[str, int]  # The key of a segment and the row of the file.


PLAIN_ARRAYS = tuple(name for name in STEP_ARRAYS if name not in ALTERNATIVES)
"""The arrays of a step, without the alternatives of its tokens."""


def steps_with_tokens(steps: QuerySet[StoredStep], names: Collection[str] = PLAIN_ARRAYS) -> list[StoredStep]:
    """The steps of a query; each has its arrays ``names`` as ``tokens``. One query."""
    left_out = [f"tokens__{name}" for name in STEP_ARRAYS if name not in names]
    return attach_steps(steps.select_related("tokens", "segment").defer(*left_out), names)


def attach_steps(steps: Iterable[StoredStep], names: Collection[str] = tuple(STEP_ARRAYS)) -> list[StoredStep]:
    """The same steps, selected with ``tokens`` and ``segment``; those in segments get their ``tokens`` from there. An
    array that is not among ``names`` is None there. The first step of a fork gets the ids of the prefix too."""
    result = list(steps)
    placed = [step for step in result if step.segment_id is not None]
    for step, arrays in zip(placed, read_places([_where(step) for step in placed], names), strict=True):
        values: dict[str, Any] = {**dict.fromkeys(STEP_ARRAYS), **arrays}
        step.tokens = StepTokens(step_id=step.pk, **values)
    if "delta_ids" in names:
        short = [step for step in result if step.parent_id is None and step.shared_length]
        prefixes = prefixes_of({step.trajectory_id for step in short})
        for step in short:
            if len(step.tokens.delta_ids) < step.prompt_length:  # in a segment it is whole
                head = prefixes[step.trajectory_id][: step.shared_length]
                step.tokens.delta_ids = np.concatenate([head, step.tokens.delta_ids])
    return result


def prefixes_of(trajectories: Collection[int]) -> dict[int, Ids]:
    """Key of a trajectory -> the prefix of the fork that it belongs to. Four queries for the forks of one parent."""
    if not trajectories:
        return {}
    runs = dict(StoredTrajectory.objects.filter(pk__in=trajectories).values_list("pk", "run_id"))
    forks = Fork.objects.select_related("base_step").in_bulk(set(runs.values()))
    prefixes = {run: fork_prefix(fork) for run, fork in forks.items()}
    return {key: prefixes[run] for key, run in runs.items() if run in prefixes}


def fork_prefix(fork: Fork) -> Ids:
    """The ids with which every trajectory of a fork begins: some of the parent, and its own tail."""
    shared = NO_IDS
    if fork.base_step is not None:
        shared = stream_ids(fork.base_step, fork.n_shared)
    elif fork.n_shared:
        (row,) = rows_with_tokens(StoredRow.objects.filter(trajectory=fork.parent_id, index=fork.row))
        shared = row.tokens.ids[: fork.n_shared]
    return np.concatenate([shared, fork.tail_ids])


def stream_ids(step: StoredStep, limit: int) -> Ids:
    """The first ids of the stream of a step, its prompt and its completion, with those of its parents. Two queries."""
    keys, extents = step_extents(step.trajectory_id)
    pieces = [piece for piece in stream_pieces(extents, step.index) if piece.start < limit]
    stored = StoredStep.objects.filter(pk__in={keys[piece.step_index] for piece in pieces})
    tokens = {stored_step.index: stored_step.tokens for stored_step in steps_with_tokens(stored)} if pieces else {}
    parts = [getattr(tokens[n], array)[: min(stop, limit) - start] for start, stop, n, array in pieces]
    return np.concatenate([NO_IDS, *parts])


def step_extents(trajectory_key: int) -> tuple[list[int], list[StepExtent]]:
    """The primary key of each step of a trajectory, and the lengths of its parts. Reads no array."""
    columns = ("pk", "parent_id", "shared_length", "prompt_length", "completion_length")
    positions: dict[int | None, int | None] = {None: None}
    keys, extents = list[int](), list[StepExtent]()
    for key, parent, *lengths in (
        StoredStep.objects.filter(trajectory=trajectory_key).order_by("index").values_list(*columns)
    ):
        positions[key] = len(keys)
        keys.append(key)
        extents.append(StepExtent(positions[parent], *lengths))
    return keys, extents


def rows_with_tokens(rows: QuerySet[StoredRow]) -> list[StoredRow]:
    """The rows of a query that have arrays of their own; each has them as ``tokens``. One query."""
    loaded = list(rows.select_related("tokens", "segment"))
    placed = [row for row in loaded if row.segment_id is not None]
    for row, arrays in zip(placed, read_places([_where(row) for row in placed], tuple(ROW_ARRAYS)), strict=True):
        values: dict[str, Any] = dict(arrays)
        row.tokens = RowTokens(row_id=row.pk, **values)
    return loaded


def columns_of_rows(rows: QuerySet[StoredRow], names: Collection[str] | None = None) -> dict[int, dict[str, Any]]:
    """The trainer's columns of the rows of a query, by the row's key and by name; ``names``: only these. One query."""
    relation = "columns"
    if names is not None:
        rows = rows.annotate(wanted=FilteredRelation("columns", condition=Q(columns__name__in=list(names))))
        relation = "wanted"
    columns: dict[int, dict[str, Any]] = defaultdict(dict)
    placed: dict[int, Where] = {}
    values = rows.order_by("pk", f"{relation}__name").values_list(
        "pk", "segment__key", "segment_offset", f"{relation}__name", f"{relation}__values"
    )
    for row, key, offset, name, array in values:
        if key is not None:
            placed[row] = key, offset
        elif name is not None:
            columns[row][name] = array
    for row, arrays in zip(placed, read_places(list(placed.values()), [COLUMNS]), strict=True):
        columns[row] = {name: column for name, column in arrays[COLUMNS].items() if names is None or name in names}
    return columns


def read_places(places: Sequence[Where], names: Collection[str]) -> list[Mapping[str, Any]]:
    """The arrays ``names`` at each place, in the order of the places."""
    if not places:
        return []
    # Pyarrow takes 40 MB of memory, and installations without segments do without it.
    from rollouts.store.token_arrays.segment_file import read_arrays

    by_key: dict[str, list[int]] = defaultdict(list)
    for n, (key, _) in enumerate(places):
        by_key[key].append(n)
    arrays_at: list[Any] = [None] * len(places)
    for key, numbers in by_key.items():
        for n, arrays in zip(numbers, read_arrays(key, [places[n][1] for n in numbers], list(names)), strict=True):
            arrays_at[n] = arrays
    return arrays_at


def _where(one: StoredStep | StoredRow) -> Where:
    assert one.segment is not None and one.segment_offset is not None
    return one.segment.key, one.segment_offset


def values_with_arrays(
    model: type[StoredStep] | type[StoredRow],
    trajectories: Collection[int],
    columns: Sequence[str],
    names: Sequence[str],
) -> Iterator[tuple[Any, ...]]:
    """Columns, then arrays, of each step or row of trajectories, in order; no objects are made of them. One query."""
    records = model._default_manager.filter(trajectory__in=trajectories).order_by("trajectory_id", "index")
    n, arrays = len(columns), [f"tokens__{name}" for name in names]
    lines = list(records.values_list(*columns, "segment__key", "segment_offset", *arrays))
    placed = iter(read_places([line[n : n + 2] for line in lines if line[n] is not None], names))
    for line in lines:
        if line[n] is None:
            yield (*line[:n], *line[n + 2 :])
        else:
            there = next(placed)
            yield (*line[:n], *(there[name] for name in names))
