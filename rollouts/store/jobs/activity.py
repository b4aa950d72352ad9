"""Whether work still changes, and whether its worker is lost. Jobs, runs and trajectories share one rule."""

from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from rollouts.store.models import ACTIVE, Job, Run, WorkStatus

JOB_SILENT_SECONDS = 30  # A running job without a heartbeat for this time has lost its worker.
JOB_LOST_SECONDS = 180  # The message of a job that is queued for this time may be lost, because Redis was restarted.
RUN_STALE_SECONDS = 20.0
"""A launched run without a heartbeat for this time has lost its worker, and its leases have run out."""

CLOCK_LEEWAY = timedelta(seconds=10)  # By so much the clocks of machines may differ.


def is_active(work: Any) -> bool:
    """Whether a run, a trajectory, a job or a template check still changes."""
    return work.status in ACTIVE


def is_silent(work: Job | Run) -> bool:
    """Whether a job or a launched run is active and has lost its worker or its message."""
    if isinstance(work, Job):
        return _has_been_silent(work.status, work.heartbeat_at, JOB_SILENT_SECONDS, JOB_LOST_SECONDS)
    started = work.started_at if work.status == WorkStatus.RUNNING else None
    last = work.heartbeat_at or started or work.created_at
    return _has_been_silent(work.status, last, RUN_STALE_SECONDS, RUN_STALE_SECONDS)


def take_back_heartbeats(work: QuerySet[Any]) -> None:
    """A heartbeat from the future becomes one of now: the clock was set back, and the worker may have been lost since.
    A worker that lives writes its next one within seconds."""
    now = timezone.now()
    work.filter(status__in=ACTIVE, heartbeat_at__gt=now + CLOCK_LEEWAY).update(heartbeat_at=now)


def _has_been_silent(status: str, last: datetime, running_seconds: float, queued_seconds: float) -> bool:
    """``last``: the time of the last heartbeat."""
    allowed = {WorkStatus.RUNNING.value: running_seconds, WorkStatus.QUEUED.value: queued_seconds}.get(status)
    return allowed is not None and (timezone.now() - last).total_seconds() > allowed
