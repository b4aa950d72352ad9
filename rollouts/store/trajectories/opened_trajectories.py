"""Trajectories of files that are shown where they lie: a line of the list each, and the rest when it is looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.runs.runs import create_run, delete_trajectories, recount, start_run
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.save_trajectories import bump_run, next_index, reward_totals
from rollouts.store.trajectories.step_writer import StepWriter
from rollouts.store.trajectories.token_encoding import encode_trajectories

OPENED = "opened"
"""In the settings of a run: the files that its trajectories are read from."""
_COUNTED = ("n_steps", "n_rows", "n_tokens", "n_sampled")
Status = models.StoredTrajectory.Status


def opened_run(paths: Sequence[str], **fields: Any) -> models.Run:
    """The run of these files, made at the first call."""
    run = models.Run.objects.filter(kind=models.Run.Kind.IMPORT, settings__opened=list(paths)).first()
    if run is None:
        name = ", ".join(path.rpartition("/")[2] for path in paths)
        run = create_run(models.Run.Kind.IMPORT, name, settings={OPENED: list(paths)}, **fields)
        start_run(run)
    return run


def names_of(run: models.Run) -> set[str]:
    """The ids of its trajectories. One query."""
    return set(run.trajectories.values_list("external_id", flat=True))


def add_opened(run: models.Run, lines: Sequence[Any], formats: Sequence[str]) -> None:
    """Add trajectories to the list. ``lines``: of the index; their steps and rows are not stored."""
    with transaction.atomic():
        models.Run.objects.filter(pk=run.pk).update(format=", ".join(formats)[:200])
        first, now = next_index(run), timezone.now()
        records = [
            models.StoredTrajectory(
                run=run, index=first + n, external_id=line["name"], group=line["prompt_group"] or "",
                status=Status.FAILED if line["error"] else Status.DONE, error=line["error"] or "",
                stop_reason=line["stop_reason"] or "", reward=line["reward"], training_step=line["training_step"],
                finished_at=now, **{name: line[name] for name in _COUNTED},
            )
            for n, line in enumerate(lines)
        ]
        models.StoredTrajectory.objects.bulk_create(records)
        failed = sum(record.status == Status.FAILED for record in records)
        totals = {name: sum(getattr(record, name) for record in records) for name in _COUNTED}
        bump_run(
            run, {}, n_trajectories=len(records), n_finished=len(records) - failed, n_failed=failed, **totals,
            **reward_totals(record.reward for record in records),
        )


def drop_opened(run: models.Run, names: Collection[str]) -> None:
    """Remove trajectories that are not in the files any more."""
    for batch in batched(sorted(names), 500):
        delete_trajectories(list(run.trajectories.filter(external_id__in=batch).values_list("pk", flat=True)))
    recount(run)


def is_filled(record: models.StoredTrajectory) -> bool:
    """Whether its steps and rows are stored, as of every run but one that was opened. There it is one query."""
    return OPENED not in record.run.settings or record.rows.exists()


def fill_opened(
    record: models.StoredTrajectory, trajectory: Trajectory, diagnosis: Diagnosis, gap: Mapping[str, Any] | None,
    table: ByteTable | None,
) -> None:
    """Store the steps, rows and findings of a trajectory of the list, once."""
    (encoded,) = encode_trajectories([trajectory], table)
    with transaction.atomic():
        models.Run.objects.select_for_update().get(pk=record.run_id)
        if record.rows.exists():
            return
        writer = StepWriter(len(trajectory.steps))
        steps = [
            writer.add_step(record.pk, encoded.values, step, coded)
            for step, coded in zip(trajectory.steps, encoded.steps, strict=True)
        ]
        writer.add_rows(record, steps, encoded.values, trajectory.rows or None, encoded.row_places)
        record.extra_id = writer.contents.add_unless_empty(trajectory.extra)
        record.reward_parts, record.tokenizer_name = dict(trajectory.reward_parts), trajectory.tokenizer
        record.prompt_line, record.answer_line = encoded.preview
        record.checks, record.gap = diagnosis.checks, gap
        writer.save()
        record.save()
        replace_findings(record.run, [(record, diagnosis.findings)])
        keep_retokenized(record.run, [(record.pk, diagnosis.again)])
