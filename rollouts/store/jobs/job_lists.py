"""Jobs of runs, as pages list them. Each function is one query."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Count, Max, Q

from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.people.access import Access
from rollouts.store.people.visible_objects import SUBJECTS

MAX_JOBS = 10


def latest_jobs(run: Run, *kinds: str) -> list[Job]:
    """The newest jobs of a run, the newest first, each with its owner, without diagnoses of pushes that are done.

    A list of several kinds does without their reports, which may be large.
    """
    told = Q(kind="diagnose_pushed", status=Job.Status.DONE)
    found = run.jobs.filter(~told, kind__in=kinds).select_related("created_by").order_by("-pk")
    return list((found.defer("report") if len(kinds) > 1 else found)[:MAX_JOBS])


def diagnosed_at(trajectory: StoredTrajectory) -> datetime | None:
    """When the findings of a trajectory were made: with its rows, or by a later job. None = it was not diagnosed."""
    if trajectory.checks is None:
        return None
    made = trajectory.finished_at or trajectory.created_at
    again = trajectory.run.jobs.filter(kind__in=("diagnose", "diagnose_pushed"), status=Job.Status.DONE)
    last = again.aggregate(last=Max("finished_at"))["last"]
    return max(made, last) if last else made


def find_job(run_code: str, code: str, *kinds: str) -> Job | None:
    """A job of a run by both codes, of one of the kinds, with its run."""
    return Job.objects.select_related("run").filter(run__code=run_code, code=code, kind__in=kinds).first()


def waiting_jobs(access: Access) -> dict[str, int]:
    """Kind -> the number of jobs that may be seen and wait for a worker."""
    queued = Job.objects.filter(status=Job.Status.QUEUED)
    waiting = access.limit(queued, *SUBJECTS).values_list("kind")
    return dict(waiting.annotate(n=Count("pk")).order_by("kind"))
