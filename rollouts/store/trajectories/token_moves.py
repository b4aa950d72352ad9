"""Moves stored arrays from one store to the other, and replaces them, while they are read. Arrays are put into their
new place first; then one short transaction lets their steps and rows name it. What changed meanwhile stays as it is. A
segment that nothing names any more stays readable until the sweep removes it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare, change_whole, insert_whole
from rollouts.store.token_arrays import STORES, Place, TokenItem, TokenStore
from rollouts.store.token_arrays.items import STEP_ARRAYS, row_item, step_item
from rollouts.store.token_arrays.reading import columns_of_rows, rows_with_tokens, steps_with_tokens
from rollouts.store.trajectories.token_encoding import derive_origins
from rollouts.store.trajectories.token_segments import mark_unused


class _Arrays(NamedTuple):
    """A step or row as it was read, with its arrays."""

    owner: models.StoredStep | models.StoredRow
    item: TokenItem


def move_arrays(run: models.Run, trajectories: Sequence[models.StoredTrajectory], store: TokenStore) -> int:
    """Move the arrays of trajectories that are not in a store yet. Returns how many steps and rows were moved. Call it
    outside a transaction."""
    arrays = _read(trajectories, Q(segment__isnull=store.slug == "segments"))
    return _replace(trajectories, arrays, store.put(run, [entry.item for entry in arrays]))


def fill_origins(
    trajectories: Sequence[models.StoredTrajectory], values: Sequence[Trajectory], token_table: ByteTable
) -> int:
    """Find the origin of tokens between completions where it is not known yet. Returns how many steps gained it. For
    trajectories that were stored before a tokenizer was chosen. ``values[i]`` is ``trajectories[i]`` as loaded. Call it
    outside a transaction."""
    lacking = {
        trajectory.pk: value
        for trajectory, value in zip(trajectories, values, strict=True)
        if any(step.delta_origin is None for step in value.steps[1:])
    }
    if not lacking:
        return 0
    steps = models.StoredStep.objects.filter(trajectory__in=lacking, parent__isnull=False)
    stored = steps_with_tokens(steps.order_by("trajectory_id", "index"))
    later = [(step.tokens, lacking[step.trajectory_id].steps[step.index], step.messages_shared) for step in stored]
    filled = derive_origins(later, token_table)
    in_segments = {stored_step.pk for stored_step in stored if stored_step.segment_id is not None}
    with transaction.atomic():
        _lock(models.StoredStep, lacking)
        inserted = [(tokens.delta_origin, tokens.pk) for tokens in filled if tokens.pk not in in_segments]
        change_whole(models.StepTokens, ("delta_origin",), inserted)
    if len(inserted) < len(filled):
        origins = {tokens.pk: tokens.delta_origin for tokens in filled}
        _put_again([stored_step for stored_step in trajectories if stored_step.pk in lacking], origins)
    return len(filled)


def _put_again(trajectories: Sequence[models.StoredTrajectory], origins: Mapping[int, Any]) -> None:
    """Put trajectories elsewhere with these origins of their steps, because segments never change. A small batch goes
    into the database, from where it is gathered with others."""
    arrays = []
    for owner, item in _read(trajectories, Q(segment__isnull=False)):
        if item.step is not None and owner.pk in origins:
            item = item._replace(arrays={**item.arrays, "delta_origin": origins[owner.pk]})
        arrays.append(_Arrays(owner, item))
    segments, items = STORES["segments"], [entry.item for entry in arrays]
    store = segments if sum(item.n_tokens for item in items) >= segments.min_tokens else STORES["database"]
    run = models.Run.objects.get(pk=trajectories[0].run_id)
    _replace(trajectories, arrays, store.put(run, items))


def _read(trajectories: Sequence[models.StoredTrajectory], where: Q) -> list[_Arrays]:
    """The arrays of trajectories, those of one trajectory together, so that a page reads few ranges of a segment."""
    codes = {trajectory.pk: trajectory.code for trajectory in trajectories}
    chosen = Q(trajectory__in=codes) & where
    steps = steps_with_tokens(models.StoredStep.objects.filter(chosen).order_by("trajectory_id", "index"), STEP_ARRAYS)
    # Other rows are the streams of steps.
    rows = rows_with_tokens(models.StoredRow.objects.filter(chosen, last_step=None).order_by("trajectory_id", "index"))
    columns = columns_of_rows(models.StoredRow.objects.filter(chosen, last_step=None)) if rows else {}
    arrays = [_Arrays(stored, step_item(codes[stored.trajectory_id], stored.index, stored.tokens)) for stored in steps]
    arrays += [
        _Arrays(stored, row_item(codes[stored.trajectory_id], stored.index, stored.tokens, columns.get(stored.pk, {})))
        for stored in rows
    ]
    return sorted(arrays, key=lambda one: one.owner.trajectory_id)


def _replace(
    trajectories: Sequence[models.StoredTrajectory], found: Sequence[_Arrays], places: Sequence[Place | None]
) -> int:
    """Let steps and rows name their new places. Returns how many did; those that changed since are left as they are."""
    keys = [trajectory.pk for trajectory in trajectories]
    if not found:
        return 0
    with transaction.atomic():
        now = {model: _lock(model, keys) for model in (models.StoredStep, models.StoredRow)}
        with_origin = models.StepTokens.objects.filter(step__trajectory__in=keys, delta_origin__isnull=False)
        filled = set(with_origin.values_list("pk", flat=True))
        moved = [
            (entry, place)
            for entry, place in zip(found, places, strict=True)
            if now[type(entry.owner)].get(entry.owner.pk) == (entry.owner.segment_id, entry.owner.segment_offset)
            and not (
                entry.owner.pk in filled and entry.item.step is not None and entry.item.arrays["delta_origin"] is None
            )
        ]
        if not moved:
            return 0
        segments = {place.segment.key: place.segment for _, place in moved if place is not None}
        for segment in segments.values():
            segment.save(force_insert=True)
        _insert([entry for entry, place in moved if place is None])
        _point(moved)
        _delete_moved(keys)
        mark_unused({entry.owner.segment_id for entry, _ in moved if entry.owner.segment_id is not None})
    return len(moved)


def _lock(model: Any, trajectories: Any) -> dict[int, tuple[int | None, int | None]]:
    """Lock the steps or rows of trajectories. Returns where each one's arrays are."""
    records = model.objects.filter(trajectory__in=list(trajectories)).select_for_update().order_by("pk")
    return {pk: (segment, offset) for pk, segment, offset in records.values_list("pk", "segment_id", "segment_offset")}


def _insert(found: Sequence[_Arrays]) -> None:
    """Insert arrays into the database."""
    insert_whole([bare(models.StepTokens, step_id=o.pk, **item.arrays) for o, item in found if item.step is not None])
    rows = [(owner.pk, item) for owner, item in found if item.step is None]
    insert_whole([bare(models.RowTokens, row_id=key, **item.arrays) for key, item in rows])
    models.RowColumn.objects.bulk_create(
        models.RowColumn(row_id=key, name=name, values=values)
        for key, item in rows
        for name, values in (item.columns or {}).items()
    )


def _point(moved: Sequence[tuple[_Arrays, Place | None]]) -> None:
    """Write into steps and rows where their arrays are."""
    steps, rows = [], []
    for (owner, item), place in moved:
        where = (None, None) if place is None else (place.segment.pk, place.offset)
        if item.step is not None:
            has_origin = None if place is None else item.arrays["delta_origin"] is not None
            steps.append((*where, has_origin, owner.pk))
        else:
            rows.append((*where, None if place is None else sorted(item.columns or ()), owner.pk))
    change_whole(models.StoredStep, ("segment_id", "segment_offset", "has_origin"), steps)
    change_whole(models.StoredRow, ("segment_id", "segment_offset", "column_names"), rows)


def _delete_moved(keys: Sequence[int]) -> None:
    """Delete the arrays of steps and rows that name a segment."""
    in_rows = {"row__trajectory__in": keys, "row__segment__isnull": False}
    for queryset in (
        models.StepTokens.objects.filter(step__trajectory__in=keys, step__segment__isnull=False),
        models.RowColumn.objects.filter(**in_rows),
        models.RowTokens.objects.filter(**in_rows),
    ):
        queryset._raw_delete(queryset.db)  # type: ignore[attr-defined]


def set_token_store(run: models.Run, store: str) -> None:
    """From now on the arrays of a run go into the store of this name."""
    models.Run.objects.filter(pk=run.pk).update(token_store=store)


def trajectories_to_move(run: models.Run, after: int, limit: int) -> list[models.StoredTrajectory]:
    """The next ``limit`` trajectories of a run behind an index that have ended. One query."""
    ended = run.trajectories.exclude(status__in=models.ACTIVE).filter(index__gt=after)
    return list(ended.only("pk", "code", "index", "n_tokens", "run_id").order_by("index")[:limit])


def runs_to_gather(kind: str) -> QuerySet[models.Run]:
    """Runs of the store ``segments`` that have ended, or were diagnosed, since the last job of this kind began."""
    jobs = models.Job.objects.filter(run=OuterRef("pk"))
    diagnosed = jobs.filter(kind="diagnose", finished_at__gt=OuterRef("finished_at")).order_by("-finished_at")
    later = jobs.filter(Q(status__in=models.ACTIVE) | Q(created_at__gte=OuterRef("settled_at")), kind=kind)
    ended = models.Run.objects.filter(token_store="segments", finished_at__isnull=False)
    settled_at = Coalesce(Subquery(diagnosed.values("finished_at")[:1]), "finished_at")
    return ended.exclude(status__in=models.ACTIVE).annotate(settled_at=settled_at).filter(~Exists(later))
