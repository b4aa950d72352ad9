"""Jobs of runs, as pages list them. Each function is one query."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from django.db.models import Count, Max, Q

from rollouts.models import Job, Run, StoredTrajectory
from rollouts.selectors.access import Access
from rollouts.selectors.visible import SUBJECTS

LISTED = (
    Job.Kind.DIAGNOSE, Job.Kind.EXPORT, Job.Kind.REPLAY, Job.Kind.DIAGNOSE_PUSHED, Job.Kind.LOSS_WEIGHTS,
    Job.Kind.RESCORE, Job.Kind.GAP,
)
"""The kinds that the page of a run lists. Its status tells of an import."""
MAX_JOBS = 10


def latest_jobs(run: Run, kinds: Collection[str] = LISTED) -> list[Job]:
    """The newest jobs of a run, the newest first, each with its owner, without diagnoses of pushes that are done.

    A list of all kinds does without their reports, which may be large.
    """
    told = Q(kind=Job.Kind.DIAGNOSE_PUSHED, status=Job.Status.DONE)
    found = run.jobs.filter(~told, kind__in=kinds).select_related("created_by").order_by("-pk")
    return list((found.defer("report") if kinds == LISTED else found)[:MAX_JOBS])


def diagnosed_at(trajectory: StoredTrajectory) -> datetime | None:
    """When the findings of a trajectory were made: with its rows, or by a later job. None = it was not diagnosed."""
    if trajectory.checks is None:
        return None
    made = trajectory.finished_at or trajectory.created_at
    again = trajectory.run.jobs.filter(kind__in=(Job.Kind.DIAGNOSE, Job.Kind.DIAGNOSE_PUSHED), status=Job.Status.DONE)
    last = again.aggregate(last=Max("finished_at"))["last"]
    return max(made, last) if last else made


def find_job(run_code: str, code: str, kinds: Collection[str] = LISTED) -> Job | None:
    """A job of a run by both codes, with its run."""
    return Job.objects.select_related("run").filter(run__code=run_code, code=code, kind__in=kinds).first()


def waiting_jobs(access: Access) -> dict[str, int]:
    """Kind -> the number of jobs that may be seen and wait for a worker."""
    queued = Job.objects.filter(status=Job.Status.QUEUED)
    waiting = access.limit(queued, *SUBJECTS).values_list("kind")
    return dict(waiting.annotate(n=Count("pk")).order_by("kind"))
