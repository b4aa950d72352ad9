"""Mends one trajectory: split at its breaks, masked where nothing was sampled, or left out. Every repair is tried and
diagnosed again. What still fails is left out, so that what is written passes the check."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_inspector.diagnose.finding import Axis, Finding
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.streams.align import trained_tokens
from rollout_inspector.streams.prefix import links_of, merge_steps, shared_with_stream
from rollout_inspector.streams.strategies.replay import StrategyResult
from rollout_inspector.streams.trajectory import Mask, Origin, Row, Trajectory

MAX_NAME = 180  # Characters of an id that stay when the number of a part is added. Readers take 200.
MASKED_AT_PLACE = frozenset(
    ("observation_trained", "generation_prompt_trained", "appended_eos_trained", "separator_trained", "trained_twice",
     "logprob_invalid")
)
"""Kinds of findings whose places should not be under the gradient."""
UNSOUND_IDS = frozenset(("token_ids_missing", "engine_ids_inconsistent", "tokenizer_mismatch"))
"""Kinds of findings that leave in doubt what was sampled. No strategy makes a good row of such ids."""

FindFaults = Callable[[Trajectory], Sequence[Finding]]  # The findings of a trajectory that fail the check.
Remake = Callable[[Trajectory], StrategyResult]  # The rows that a strategy makes of a trajectory.


class MendWay(StrEnum):
    """What is done to a trajectory that fails."""

    SPLIT = "split"  # Cut before each call that breaks; every part is a trajectory. Faults of a row are masked.
    MASK = "mask"  # What came before a break is prompt, without a gradient. Faults of a row are masked.
    DROP = "drop"
    STRATEGY = "strategy"  # Its rows are those of a strategy, and its calls are left out.


@dataclass
class MendedPart:
    """A part of a trajectory, or all of it: what is written of it, or why it is left out."""

    trajectory: Trajectory
    steps: tuple[int, ...]  # Its calls, as numbers in the source.
    actions: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)  # Columns of rows that were built again from their steps.
    kinds: tuple[str, ...] = ()  # Of a part that is left out: the kinds of findings that it has after every repair.
    reason: str = ""  # Why it is left out; empty = it is written.


@dataclass(frozen=True)
class MendedTrajectory:
    """What became of a trajectory."""

    parts: tuple[MendedPart, ...]  # The trajectory itself where nothing was changed.
    actions: tuple[str, ...] = ()
    """``split``, ``masked``, ``rebuilt``, ``rows_left_out``, ``strategy``, ``left_out``; empty = unchanged."""
    kinds: tuple[str, ...] = ()  # The kinds of findings that it failed by.
    masked: tuple[tuple[int, ...], ...] = ()
    """Where masking alone was done: for each row the offsets that lost the gradient."""
    unmasked: tuple[tuple[int, ...], ...] = ()  # The same of offsets that got it, because their mask had been shifted.

    @property
    def written(self) -> list[MendedPart]:
        """The parts that are written."""
        return [part for part in self.parts if not part.reason]


def left_out(trajectory: Trajectory, kinds: tuple[str, ...], reason: str) -> MendedTrajectory:
    """A trajectory of which nothing is written."""
    part = MendedPart(trajectory, tuple(range(len(trajectory.steps))), kinds=kinds, reason=reason)
    return MendedTrajectory((part,), ("left_out",), kinds)


def mend_trajectory(
    trajectory: Trajectory, way: MendWay, find_faults: FindFaults, remake: Remake | None = None
) -> MendedTrajectory:
    """Mend a trajectory. ``remake`` is needed for the way ``STRATEGY``. Every written trajectory has no fault."""
    faults = find_faults(trajectory)
    every = tuple(range(len(trajectory.steps)))
    if not faults:
        return MendedTrajectory((MendedPart(trajectory, every),))
    kinds = _kinds(faults)
    if way is MendWay.DROP:
        return left_out(trajectory, kinds, "It fails the check.")
    if way is MendWay.STRATEGY:
        assert remake is not None
        return _remade(trajectory, kinds, find_faults, remake(trajectory))
    parts = _cut(trajectory, faults, way)
    is_split = len(parts) > 1
    for n, part in enumerate(parts):
        remaining = find_faults(part.trajectory)
        if remaining and (repaired := _repaired(part, remaining, find_faults)) is not None:
            parts[n] = repaired
        elif remaining:
            part.kinds, part.reason = _kinds(remaining), "No repair makes it pass the check."
    if way is MendWay.MASK and not is_split and parts[0].steps != every:
        parts[0].actions.insert(0, "masked")
    written = [part for part in parts if not part.reason]
    actions = [*(["split"] if is_split else []), *(action for part in written for action in part.actions)]
    actions += ["left_out"] if len(written) < len(parts) else []
    same_rows = len(written) == 1 and written[0].actions == ["masked"] and written[0].steps == every
    return MendedTrajectory(
        tuple(parts), tuple(dict.fromkeys(actions)), kinds,
        _changed_masks(trajectory, written[0].trajectory, True) if same_rows else (),
        _changed_masks(trajectory, written[0].trajectory, False) if same_rows else (),
    )


def _kinds(faults: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fault.kind for fault in faults))


def _changed_masks(before: Trajectory, after: Trajectory, lost: bool) -> tuple[tuple[int, ...], ...]:
    """For each row the offsets that lost the gradient, or those that got it."""
    pairs = zip(rows_of(before), rows_of(after), strict=True)
    return tuple(
        tuple(np.flatnonzero((old.loss_mask != new.loss_mask) & (old.loss_mask == lost)).tolist()) for old, new in pairs
    )


def _remade(
    trajectory: Trajectory, kinds: tuple[str, ...], find_faults: FindFaults, result: StrategyResult
) -> MendedTrajectory:
    if doubtful := sorted(UNSOUND_IDS & set(kinds)):
        reason = f"Its ids are in doubt ({', '.join(doubtful)}), and rows alone would not show it."
        return left_out(trajectory, kinds, reason)
    if result.refused or not result.rows:
        return left_out(trajectory, kinds, result.refused or "The strategy makes no row of it.")
    rows = tuple(replace(row, step_indices=()) for row in result.rows)
    remade = replace(trajectory, steps=(), rows=rows, extra={**trajectory.extra, "mended": {"strategy": result.slug}})
    if faults := find_faults(remade):
        reason = f"The rows of the strategy {result.slug} fail the check."
        return replace(left_out(trajectory, _kinds(faults), reason), kinds=kinds)
    columns = [name for row in trajectory.rows for name in row.columns]
    part = MendedPart(remade, tuple(range(len(trajectory.steps))), columns=columns)
    return MendedTrajectory((part,), ("strategy",), kinds)


# -- breaks ----------------------------------------------------------------------------------------


def _cut(trajectory: Trajectory, faults: Sequence[Finding], way: MendWay) -> list[MendedPart]:
    """The parts between breaks. Calls that follow each other without a break stay in one part. The way ``MASK`` keeps
    only the parts that no later part continues: what they continue is in their prompts."""
    steps, links = trajectory.steps, links_of(trajectory)
    cuts = {fault.step for fault in faults if fault.step and fault.axis in (Axis.STREAM, Axis.DELTA)}
    part_of = list(range(len(steps)))
    chain_before = {b: a for chain in merge_steps(steps, links) for a, b in pairwise(chain)}
    for index, link in enumerate(links):
        parent = chain_before.get(index, link.parent)
        if parent is not None and index not in cuts:
            part_of[index] = part_of[parent]
    members: dict[int, list[int]] = {}
    for index, first in enumerate(part_of):
        members.setdefault(first, []).append(index)
    if way is MendWay.MASK:
        befores = (chain_before.get(cut, links[cut].parent) for cut in cuts)
        continued = {part_of[before] for before in befores if before is not None}
        members = {first: indices for first, indices in members.items() if first not in continued}
    if len(members) <= 1 and (not members or len(next(iter(members.values()))) == len(steps)):
        return [MendedPart(trajectory, tuple(range(len(steps))))]
    return [
        _part(trajectory, tuple(indices), way, n, len(members)) for n, indices in enumerate(members.values(), start=1)
    ]


def _part(trajectory: Trajectory, members: tuple[int, ...], way: MendWay, n: int, n_parts: int) -> MendedPart:
    number = {index: place for place, index in enumerate(members)}
    rows = []
    for row in trajectory.rows:
        inside = [number[index] for index in row.step_indices if index in number]
        if inside and (way is MendWay.MASK or len(inside) == len(row.step_indices)):
            rows.append(replace(row, step_indices=tuple(inside)))
    mended: dict[str, Any] = {"of": trajectory.external_id, "steps": list(members), "part": n, "parts": n_parts}
    part = replace(
        trajectory,
        external_id=f"{trajectory.external_id[:MAX_NAME]}-part-{n}" if n_parts > 1 else trajectory.external_id,
        steps=tuple(trajectory.steps[index] for index in members),
        rows=tuple(rows),
        extra={**trajectory.extra, "mended": mended},
    )
    has_crossing = bool(trajectory.rows) and not rows
    columns = [name for row in trajectory.rows for name in row.columns] if has_crossing else []
    return MendedPart(part, members, ["rebuilt"] if has_crossing else [], columns)


# -- rows ------------------------------------------------------------------------------------------


def _repaired(part: MendedPart, faults: Sequence[Finding], find_faults: FindFaults) -> MendedPart | None:
    """The first repair of the rows that leaves no fault; None = there is none."""
    for action, rows, columns in _repairs(part.trajectory, faults):
        tried = replace(part.trajectory, rows=tuple(rows))
        if not find_faults(tried):
            return MendedPart(tried, part.steps, [*part.actions, action], [*part.columns, *columns])
    return None


def _repairs(trajectory: Trajectory, faults: Sequence[Finding]) -> Iterator[tuple[str, Sequence[Row], list[str]]]:
    """What may mend the rows, the gentlest first: an action, the rows, and the columns that they lose."""
    rows = trajectory.rows
    if not rows:
        return
    for masks in (_masks_of_places(rows, faults), _masks_of_steps(trajectory), _masks_of_streams(trajectory)):
        masked = [_masked(row, mask) for row, mask in zip(rows, masks, strict=True)]
        yield "masked", masked, []
        if len(trained := [row for row in masked if row.loss_mask.any()]) < len(rows) and trained:
            yield "rows_left_out", trained, []
    if trajectory.steps:
        yield "rebuilt", (), [name for row in rows for name in row.columns]
    faulty = {fault.row for fault in faults if fault.axis is Axis.ROW}
    if sound := [row for n, row in enumerate(rows) if n not in faulty]:
        yield "rows_left_out", sound, []


def _masked(row: Row, mask: Mask) -> Row:
    """The row with another mask. Advantages go with the gradient where masked tokens have none."""
    lost, gained = row.loss_mask & ~mask, mask & ~row.loss_mask
    columns = dict(row.columns)
    for name, values in columns.items():
        if "advantage" in name and len(values) == len(mask) and not np.nan_to_num(values[~row.loss_mask]).any():
            shared = np.unique(values[row.loss_mask])
            values = np.where(gained, shared[0], values) if len(shared) == 1 else values
            columns[name] = np.where(lost, np.float32(0), values).astype(np.float32)
    return replace(row, loss_mask=mask, columns=columns)


def _masks_of_places(rows: Sequence[Row], faults: Sequence[Finding]) -> list[Mask]:
    """Everything but the places that findings name, and what the origins know as not sampled. A mask that was shifted
    is wrong at every place that its finding names, and nowhere else."""
    masks = [row.loss_mask.copy() for row in rows]
    for fault in faults:
        if fault.row is None or (fault.kind == "columns_shifted" and not fault.places):
            continue
        for start, stop in fault.stretches:
            if fault.kind == "columns_shifted":
                masks[fault.row][start:stop] ^= True
            elif fault.kind in MASKED_AT_PLACE:
                masks[fault.row][start:stop] = False
    for row, mask in zip(rows, masks, strict=True):
        if row.origin is not None and len(row.origin) == len(mask):
            mask &= row.origin == Origin.SAMPLED
    return masks


def _masks_of_steps(trajectory: Trajectory) -> list[Mask]:
    """Tokens that a step sampled, wherever they stand in a row that names the step."""
    foreign = trained_tokens(trajectory.steps, trajectory.rows).foreign
    return [
        row.loss_mask if mask is None or len(mask) != len(row.loss_mask) else row.loss_mask & ~mask
        for row, mask in zip(trajectory.rows, foreign, strict=True)
    ]


def _masks_of_streams(trajectory: Trajectory) -> list[Mask]:
    """Tokens that a step sampled after exactly what stands before them in the row."""
    masks: list[Mask] = []
    for row in trajectory.rows:
        steps = [trajectory.steps[n] for n in row.step_indices if n < len(trajectory.steps)]
        mask: Mask = np.full(len(row.loss_mask), not steps, dtype=np.bool_)
        for step in steps:
            mask[len(step.prompt_ids) : shared_with_stream(row.ids, step)] = True
        masks.append(row.loss_mask & mask)
    return masks
