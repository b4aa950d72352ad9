"""Stored trajectories as values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from django.db.models import Max, QuerySet

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.coding import ARRAYS, BODIES, COLUMNS, REQUEST_FIELDS, StepCodec, StepField
from rollout_inspector.streams.trajectory import Floats, Ids, Request, Row, Step, Trajectory
from rollouts.store import models
from rollouts.store.token_arrays.items import STEP_ARRAYS
from rollouts.store.token_arrays.reading import columns_of_rows, rows_with_tokens, steps_with_tokens, stream_ids

LAST = 2**31 - 1  # No trajectory has a larger index.


def load_trajectory(trajectory: models.StoredTrajectory) -> Trajectory:
    """The stored value, with identical arrays. Five queries for a trajectory of every length. ``rows`` holds the rows
    that a trainer or a strategy wrote, without the rows that follow from the steps."""
    return next(load_trajectories([trajectory]))


def load_trajectories(trajectories: Sequence[models.StoredTrajectory]) -> Iterator[Trajectory]:
    """The values of several trajectories, in their order. The number of queries is fixed."""
    keys = [trajectory.pk for trajectory in trajectories]
    steps: dict[int, list[models.StoredStep]] = {key: [] for key in keys}
    for step in steps_with_tokens(models.StoredStep.objects.filter(trajectory__in=keys).order_by("index"), STEP_ARRAYS):
        steps[step.trajectory_id].append(step)
    rows: dict[int, list[models.StoredRow]] = {key: [] for key in keys}
    own = models.StoredRow.objects.filter(trajectory__in=keys, last_step=None)
    for row in rows_with_tokens(own.order_by("index")):
        rows[row.trajectory_id].append(row)
    columns = columns_of_rows(own) if any(rows.values()) else {}
    body_keys = {trajectory.extra_id for trajectory in trajectories}
    body_keys.update(body for records in steps.values() for step in records for body in _BODY_KEYS(step))
    body_keys.update(row.extra_id for records in rows.values() for row in records)
    bodies = _Bodies(body_keys)
    for trajectory in trajectories:
        yield Trajectory(
            external_id=trajectory.external_id,
            steps=tuple(_steps(steps[trajectory.pk], bodies)),
            rows=tuple(_row(row, columns.get(row.pk, {}), bodies) for row in rows[trajectory.pk]),
            reward=trajectory.reward,
            reward_parts=trajectory.reward_parts,
            stop_reason=trajectory.stop_reason,
            error=trajectory.error if trajectory.status == models.StoredTrajectory.Status.FAILED else "",
            group=trajectory.group,
            tokenizer=trajectory.tokenizer_name,
            training_step=trajectory.training_step,
            extra=bodies[trajectory.extra_id] or {},
        )


class _Bodies:
    """Stored JSON values by key, each decoded once."""

    def __init__(self, keys: set[str | None]) -> None:
        ordered = sorted(key for key in keys if key)
        self._texts: dict[str, str] = {}
        # SQLite takes a bounded number of parameters in one query.
        for batch in batched(ordered, 900):
            self._texts.update(models.Content.objects.filter(pk__in=batch).values_list("pk", "body"))
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str | None) -> Any:
        if key is None:
            return None
        if key not in self._values:
            self._values[key] = json.loads(self._texts[key])
        return self._values[key]


BODY_COLUMNS = ("messages_new_id", *(field.column for field in (*BODIES, *REQUEST_FIELDS)))
"""The columns of a stored step that hold keys of ``Content``."""
_BODY_KEYS = attrgetter(*BODY_COLUMNS)


def _steps(stored: Sequence[models.StoredStep], bodies: _Bodies) -> list[Step]:
    codec = StepCodec(canonical_json)
    positions: dict[int | None, int | None] = {None: None}
    for n, step in enumerate(stored):
        parent = positions[step.parent_id]
        positions[step.pk] = n
        columns, arrays = vars(step), vars(step.tokens)
        request = None
        if step.messages_new_id is not None:
            messages = codec.messages(parent, step.messages_shared, bodies[step.messages_new_id])
            request = Request(messages, **_values(REQUEST_FIELDS, columns, bodies))
        fields = {name: columns[name] for name in COLUMNS}
        fields |= {name: arrays[name] for name in ARRAYS}
        fields |= _values(BODIES, columns, bodies)
        prompt = codec.prompt_ids(parent, step.shared_length, arrays["delta_ids"])
        codec.steps.append(Step(prompt_ids=prompt, delta_origin=arrays["delta_origin"], request=request, **fields))
    return codec.steps


def _values(fields: Sequence[StepField], held: Mapping[str, Any], bodies: _Bodies) -> dict[str, Any]:
    """The values of the JSON bodies that a stored step has."""
    values = {}
    for name, kind, _, column in fields:
        key = held[column]
        if key is not None:
            values[name] = tuple(bodies[key]) if kind == "tools" else bodies[key]
    return values


def _row(row: models.StoredRow, columns: Mapping[str, Floats], bodies: _Bodies) -> Row:
    tokens = row.tokens
    return Row(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        logprobs=tokens.logprobs,
        origin=tokens.origin,
        columns=columns,
        step_indices=tuple(row.step_indices),
        extra=bodies[row.extra_id] or {},
    )


def load_step_prompt(step: models.StoredStep) -> Ids:
    """The prompt ids ``[P]`` of one step, with those of its parents. Two queries."""
    return stream_ids(step, step.prompt_length)


def find_trajectory(code: str) -> models.StoredTrajectory | None:
    """A trajectory with its run and the run's tokenizer. One query."""
    return models.StoredTrajectory.objects.select_related("run__tokenizer").filter(code=code).first()


def finished_trajectories(run: models.Run, first: int = 0, last: int = LAST) -> QuerySet[models.StoredTrajectory]:
    """The finished trajectories of a run in a range of indices, both inclusive, in order."""
    done = run.trajectories.filter(status=models.StoredTrajectory.Status.DONE, index__lte=last)
    return (done.filter(index__gte=first) if first > 0 else done).order_by("index")


def trajectories_by_key(keys: Sequence[int]) -> list[models.StoredTrajectory]:
    """The trajectories with these keys, in their order; deleted ones are left out. One query."""
    stored = models.StoredTrajectory.objects.in_bulk(keys)
    return [stored[key] for key in keys if key in stored]


def trajectory_batches(
    trajectories: QuerySet[models.StoredTrajectory], size: int
) -> Iterator[list[models.StoredTrajectory]]:
    """The trajectories of a query in its order, ``size`` at a time; deleted ones are left out. One query for each list.
    Between two lists no cursor is open, so the caller may write. SQLite refuses a write at once where a cursor of the
    same connection still reads the state before a write of somebody else."""
    for keys in batched(list(trajectories.values_list("pk", flat=True)), size):
        if batch := trajectories_by_key(keys):
            yield batch


def find_by_external_id(run: models.Run, external_id: str) -> models.StoredTrajectory | None:
    """The trajectory that a source gave this id. One query."""
    return run.trajectories.filter(external_id=external_id).first()


def taken_ids(run: models.Run, external_ids: Sequence[str]) -> set[str]:
    """Those of the ids that trajectories of a run have. One query."""
    return set(run.trajectories.filter(external_id__in=external_ids).values_list("external_id", flat=True))


def ids_and_codes(run: models.Run) -> list[tuple[str, str]]:
    """External id and code of the trajectories of a run, in order. One query."""
    return list(run.trajectories.order_by("index").values_list("external_id", "code"))


def rewards_of(run: models.Run) -> list[float]:
    """The rewards of the finished trajectories of a run that have one. One query."""
    done = run.trajectories.filter(status=models.StoredTrajectory.Status.DONE).exclude(reward=None)
    return [reward for reward in done.values_list("reward", flat=True) if reward is not None]


def last_index(trajectories: QuerySet[models.StoredTrajectory]) -> int | None:
    """The largest index of a query's trajectories; None = there are none. One query."""
    largest: int | None = trajectories.aggregate(last=Max("index"))["last"]
    return largest


def only_finished(trajectories: QuerySet[models.StoredTrajectory]) -> QuerySet[models.StoredTrajectory]:
    """The finished ones of a query's trajectories, in the order of their run."""
    return trajectories.filter(status=models.StoredTrajectory.Status.DONE).order_by("index")


def next_trajectories(
    trajectories: QuerySet[models.StoredTrajectory], after: int, limit: int
) -> list[models.StoredTrajectory]:
    """Of a query in the order of a run, the next ``limit`` trajectories behind an index. One query."""
    return list(trajectories.filter(index__gt=after)[:limit])
