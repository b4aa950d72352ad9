"""The causes of the gap between trainer and sampler that the stored reports of runs name."""

from collections.abc import Collection
from typing import NamedTuple

from django.db.models import Sum

from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.trajectories.trajectories import finished_trajectories


class NamedCause(NamedTuple):
    """A cause of :data:`rollout_inspector.diagnose.gap.cause_kinds.CAUSES` in a run."""

    cause: str  # Its name.
    from_step: int | None  # The first training step that shows it; None = the run has no training steps.


def newest_report(run: Run) -> tuple[str, int, str] | None:
    """Of the newest report its key, the trajectories that the run had finished then, and the column of the trainer. 0 =
    an older version did not say; empty = as recorded. None = no report. One query."""
    done = run.jobs.filter(kind="gap", status=Job.Status.DONE, report__key__isnull=False).order_by("-pk")
    for key, finished, compared in done.values_list("report__key", "report__finished", "report__compared")[:1]:
        return key, finished or 0, (compared or ["", ""])[1]
    return None


def named_causes(runs: Collection[Run]) -> dict[int, list[NamedCause]]:
    """Key of a run -> the causes that its newest report names, in the order of the rules. One query. A report of two
    other columns than the recorded ones does not speak of sampler and trainer, and is left out."""
    done = Job.objects.filter(run__in=[run.pk for run in runs], kind="gap", status=Job.Status.DONE)
    by_run: dict[int, list[NamedCause]] = {}
    for key, causes, compared in done.order_by("pk").values_list("run_id", "report__causes", "report__compared"):
        if key is not None and causes is not None and not (compared or ["", ""])[1]:
            by_run[key] = [NamedCause(cause["cause"], cause["from_step"]) for cause in causes]
    return by_run


RECENT = 200  # Trajectories at the end of a run that are asked for a gap where the answer must be cheap.


def has_gap(run: Run, recent: int | None = None) -> bool:
    """Whether a trajectory of a run has a gap. ``recent``: one of so many last ones, which is cheap in a large run."""
    if recent is None:
        return run.trajectories.exclude(gap=None).exists()
    last = run.trajectories.order_by("-index").values("pk")[:recent]
    return StoredTrajectory.objects.filter(pk__in=last).exclude(gap=None).exists()


def trajectories_with_gap(run: Run, recorded: bool) -> tuple[list[tuple[int, int]], int, int]:
    """Key and tokens of the finished trajectories; the tokens that they train; how many were left out. Three queries.
    ``recorded``: those without a recorded gap are left out."""
    finished, n_without = finished_trajectories(run), 0
    if recorded:
        n_without = finished.filter(gap__isnull=True).count()
        finished = finished.exclude(gap=None)
    trained: int = finished.order_by().aggregate(n=Sum("n_trained", default=0))["n"]
    return list(finished.values_list("pk", "n_tokens")), trained, n_without
