"""Whether work still changes, and whether its worker is lost: one rule for jobs, runs and trajectories."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils import timezone

from rollouts.models import ACTIVE, Job, Run, WorkStatus

JOB_SILENT_SECONDS = 45
"""A running job without a heartbeat for so long has lost its worker."""
JOB_LOST_SECONDS = 180
"""A job that has been queued for so long may have lost its message with a Redis that was restarted."""
RUN_STALE_SECONDS = 20.0
"""A launched run without a heartbeat for so long has lost its worker: every lease of it has run out."""


def is_active(work: Any) -> bool:
    """Whether a run, a trajectory, a job or a template check still changes."""
    return work.status in ACTIVE


def is_silent(work: Job | Run) -> bool:
    """Whether a job or a launched run should be under way, and its worker or its message is lost."""
    if isinstance(work, Job):
        return _has_been_silent(work.status, work.heartbeat_at, JOB_SILENT_SECONDS, JOB_LOST_SECONDS)
    started = work.started_at if work.status == WorkStatus.RUNNING else None
    last = work.heartbeat_at or started or work.created_at
    return _has_been_silent(work.status, last, RUN_STALE_SECONDS, RUN_STALE_SECONDS)


def _has_been_silent(status: str, last: datetime, running_seconds: float, queued_seconds: float) -> bool:
    """``last``: when the work showed its last sign of life."""
    allowed = {WorkStatus.RUNNING.value: running_seconds, WorkStatus.QUEUED.value: queued_seconds}.get(status)
    return allowed is not None and (timezone.now() - last).total_seconds() > allowed
