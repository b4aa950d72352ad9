"""Trajectories of files that are shown where they lie: a line of the list each, and the rest when it is looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.store import models
from rollouts.store.runs.runs import create_run, recount, start_run
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.save_trajectories import bump_run, save_trajectories

OPENED = "opened"  # In the settings of a run: the files that its trajectories are read from.
_FIGURES = ("n_steps", "n_rows", "n_tokens", "n_sampled", "n_trained")


def opened_run(paths: Sequence[str], **fields: Any) -> models.Run:
    """The run of these files, made at the first call."""
    run = models.Run.objects.filter(settings__opened=list(paths)).first()
    if run is None:
        name = ", ".join(path.rpartition("/")[2] for path in paths)
        run = create_run(models.Run.Kind.IMPORT, name, settings={OPENED: list(paths)}, **fields)
    start_run(run)
    return run


def add_opened(run: models.Run, lines: Sequence[Any], formats: Sequence[str]) -> None:
    """Add trajectories to the list, with the figures of the index. Their steps and rows are not stored."""
    names = {"reward": "reward", "group": "prompt_group", "training_step": "training_step",
             "stop_reason": "stop_reason", "error": "error"}
    trajectories = [Trajectory(line["name"], **{name: line[key] for name, key in names.items()}) for line in lines]
    with transaction.atomic():
        models.Run.objects.filter(pk=run.pk).update(format=", ".join(formats)[:200])
        records = save_trajectories(run, trajectories)
        for record, line in zip(records, lines, strict=True):
            for name in _FIGURES:
                setattr(record, name, line[name])
        models.StoredTrajectory.objects.bulk_update(records, _FIGURES, batch_size=100)
        bump_run(run, {}, **{name: sum(line[name] for line in lines) for name in _FIGURES[:-1]})


def add_checked(run: models.Run, diagnoses: Mapping[str, tuple[Sequence[Finding], Mapping[str, Any]]]) -> None:
    """Add to the list what was found, and what each check came to, in trajectories by their id that nobody opened."""
    with transaction.atomic():
        records = list(run.trajectories.filter(external_id__in=list(diagnoses), checks__isnull=True))
        for record in records:
            record.checks = dict(diagnoses[record.external_id][1])
        replace_findings(run, [(record, diagnoses[record.external_id][0]) for record in records])


def is_filled(record: models.StoredTrajectory) -> bool:
    """Whether its steps and rows are stored, as of every run but one that was opened. There it is one query."""
    return OPENED not in record.run.settings or record.rows.exists()


def take_place(record: models.StoredTrajectory) -> None:
    """Make the record, which was removed, the trajectory that was stored in its place: it keeps the address."""
    models.StoredTrajectory.objects.filter(run=record.run_id, index=record.index).update(code=record.code)
    record.pk = models.StoredTrajectory.objects.get(code=record.code).pk
    record.refresh_from_db()
    recount(record.run)
