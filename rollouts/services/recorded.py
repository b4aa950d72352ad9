"""Writing trajectories as their calls pass the recorder. One recorder writes a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from rollouts import models
from rollouts.selectors.streams import Streams, stored_streams
from rollouts.services.bulk import reserve_keys
from rollouts.services.contents import Contents
from rollouts.services.findings import replace_findings
from rollouts.services.trajectories import (
    Rows,
    TokenTable,
    build_rows,
    bump_run,
    derive_origins,
    insert_rows,
    leading_equal,
    make_step,
    make_step_tokens,
    message_texts,
    reward_totals,
    set_totals,
)
from rollouts.tito.prefix import link_steps
from rollouts.tito.trajectory import Step
from rollouts.tito.trajectory_end import TrajectoryEnd

Status = models.StoredTrajectory.Status
_TOTALS = ("n_steps", "n_rows", "n_tokens", "n_sampled")


def append_steps(
    run: models.Run, calls: Mapping[str, Sequence[Step]], token_table: TokenTable | None = None
) -> dict[str, models.StoredTrajectory]:
    """Add steps to the trajectories of these external ids, begun where they are new; rows follow at once.

    One transaction. A trajectory that was settled is under way again.
    """
    with transaction.atomic():
        records, begun, reopened = _records(run, calls)
        before = {record.pk: [getattr(record, name) for name in _TOTALS] for record in records.values()}
        streams = stored_streams(before.keys())
        earlier: dict[int, list[models.StoredStep]] = defaultdict(list)
        for stored in models.StoredStep.objects.filter(trajectory__in=before).order_by("trajectory_id", "index"):
            earlier[stored.trajectory_id].append(stored)
        contents = Contents()
        keys = reserve_keys(models.StoredStep, sum(len(steps) for steps in calls.values()))
        tokens: list[models.StepTokens] = []
        added: list[models.StoredStep] = []
        built: list[Rows] = []
        moved: list[models.StoredStep] = []
        for name, steps in calls.items():
            record = records[name]
            held, fresh = streams[record.pk], []
            for step in steps:
                stored, its_tokens = _new_step(record, held, step, contents, next(keys), token_table)
                fresh.append(stored)
                tokens.append(its_tokens)
            old = earlier[record.pk]
            rows_before = [stored.row_index for stored in old]
            built.append(build_rows(record, [*old, *fresh], held.values, None, held.links, contents))
            moved += [stored for stored, row in zip(old, rows_before, strict=True) if stored.row_index != row]
            set_totals(record, [*old, *fresh], built[-1].rows)
            added += fresh
        contents.save()
        models.StoredRow.objects.filter(trajectory__in=before).delete()
        models.StoredStep.objects.bulk_create(added)
        models.StepTokens.objects.bulk_create(tokens)
        models.StoredStep.objects.bulk_update(moved, ["row_index"], batch_size=100)
        # Each trajectory's rows were built before any was inserted, so their keys are dealt out once more, for all.
        row_keys = reserve_keys(models.StoredRow, sum(len(one.rows) for one in built))
        for one in built:
            for row in one.rows:
                row.pk = next(row_keys)
        insert_rows(built)
        fields = ["status", "finished_at", "n_trained", *_TOTALS]
        models.StoredTrajectory.objects.bulk_update(records.values(), fields, batch_size=100)
        grown = {
            total: sum(getattr(record, total) - before[record.pk][n] for record in records.values())
            for n, total in enumerate(_TOTALS)
        }
        bump_run(run, {}, n_trajectories=begun, n_finished=-reopened, **grown)
    return records


def _records(run: models.Run, names: Mapping[str, object]) -> tuple[dict[str, models.StoredTrajectory], int, int]:
    """The trajectories by external id, how many of them are new, and how many had been settled."""
    models.Run.objects.select_for_update().get(pk=run.pk)
    found = {record.external_id: record for record in run.trajectories.filter(external_id__in=list(names))}
    last = run.trajectories.aggregate(last=Max("index"))["last"]
    first = 0 if last is None else last + 1
    missing = [name for name in names if name not in found]
    keys = reserve_keys(models.StoredTrajectory, len(missing))
    begun = [
        models.StoredTrajectory(pk=next(keys), run=run, external_id=name, index=first + n, status=Status.RUNNING)
        for n, name in enumerate(missing)
    ]
    models.StoredTrajectory.objects.bulk_create(begun)
    reopened = 0
    for record in found.values():
        reopened += record.status == Status.DONE
        record.status, record.finished_at = Status.RUNNING, None
    return {**found, **{record.external_id: record for record in begun}}, len(begun), reopened


def _new_step(
    record: models.StoredTrajectory, held: Streams, step: Step, contents: Contents, key: int, table: TokenTable | None
) -> tuple[models.StoredStep, models.StepTokens]:
    bare = replace(step, request=None, reply=None, text=None, extra={})
    link = link_steps([*held.values, bare])[-1]
    texts = message_texts(step)
    shared = 0 if link.parent is None else leading_equal(held.message_texts(link.parent), texts)
    parent = None if link.parent is None else held.keys[link.parent]
    stored = make_step(record.pk, len(held), step, link, parent, texts, shared, contents, key)
    held.append(key, bare, texts)
    held.links.append(link)
    tokens = make_step_tokens(stored, step, link)
    if table is not None and link.parent is not None:
        derive_origins([(tokens, step, shared)], table)
    return stored, tokens


def settle_trajectory(run: models.Run, end: TrajectoryEnd) -> None:
    """A recorded trajectory has ended, as far as can be told. A reward or reason that the end lacks stays as it was."""
    with transaction.atomic():
        models.Run.objects.select_for_update().get(pk=run.pk)
        record = run.trajectories.filter(external_id=end.key).first()
        if record is None:
            return
        finished = record.status != Status.DONE
        record.status, record.finished_at = Status.DONE, timezone.now()
        before = reward_totals([record.reward])
        record.reward = record.reward if end.reward is None else end.reward
        record.stop_reason = end.stop_reason[:60] or record.stop_reason
        record.save(update_fields=["status", "finished_at", "reward", "stop_reason"])
        replace_findings(run, [(record, end.findings)])
        after = reward_totals([record.reward])
        bump_run(run, {}, n_finished=int(finished), **{name: after[name] - before[name] for name in after})
