"""Jobs: work on a run that has ended. Who holds one is said by its attempt; a heartbeat says that it lives."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from rollouts.models import Job, Run

SILENT_SECONDS = 45
"""A job under way without a sign of life for so long has lost its worker."""
LOST_SECONDS = 180
"""A job that has been queued for so long may have lost its message with a Redis that was restarted."""
_OPEN = (Job.Status.QUEUED, Job.Status.RUNNING)


class JobLost(Exception):
    """The job is no longer ours: it was cancelled, taken over, or deleted with its run."""


def is_silent(job: Job) -> bool:
    """Whether it should be under way and shows no sign of life."""
    quiet = (timezone.now() - job.heartbeat_at).total_seconds()
    return (job.status == Job.Status.RUNNING and quiet > SILENT_SECONDS) or (
        job.status == Job.Status.QUEUED and quiet > LOST_SECONDS
    )


def ask_job(run: Run, kind: str, options: Mapping[str, Any], user: Any = None) -> tuple[Job, bool]:
    """The job of a kind that works on a run, and whether a worker has to be sent for it.

    One that works already is given as it is. One whose worker is lost goes on where it was when the same is asked, else
    it ends and a new one begins.
    """
    owner = user if user is not None and getattr(user, "is_authenticated", False) else None
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)  # two presses at once queue here
        held = Job.objects.filter(run=run, kind=kind, status__in=_OPEN).first()
        if held is not None and not is_silent(held):
            return held, False
        if held is not None and held.options == dict(options):
            held.heartbeat_at, held.status, held.cancel_requested = timezone.now(), Job.Status.QUEUED, False
            held.save(update_fields=["heartbeat_at", "status", "cancel_requested"])
            return held, True
        if held is not None:
            held.status, held.error, held.finished_at = Job.Status.FAILED, "Its worker was lost.", timezone.now()
            held.save(update_fields=["status", "error", "finished_at"])
        return Job.objects.create(run=run, kind=kind, options=dict(options), created_by=owner), True


def take_job(pk: int) -> Job | None:
    """The job for the worker that takes it now; None when another one has it, or it has ended."""
    job = Job.objects.filter(pk=pk, status__in=_OPEN).first()
    if job is None or (job.status == Job.Status.RUNNING and not is_silent(job)):
        return None
    ours = Job.objects.filter(pk=pk, status=job.status, attempt=job.attempt).update(
        status=Job.Status.RUNNING, attempt=F("attempt") + 1, heartbeat_at=timezone.now()
    )
    return Job.objects.get(pk=pk) if ours else None


def beat_job(job: Job, **fields: Any) -> None:
    """Say that the work is alive, and how far it is. Raises :class:`JobLost` when it is to stop."""
    ours = Job.objects.filter(pk=job.pk, attempt=job.attempt, status=Job.Status.RUNNING, cancel_requested=False)
    if not ours.update(heartbeat_at=timezone.now(), **fields):
        raise JobLost
    for name, value in fields.items():
        setattr(job, name, value)


def end_job(job: Job, status: str, error: str = "", **fields: Any) -> bool:
    """The work is over; False, and nothing changed, when another worker holds the job by now."""
    ours = Job.objects.filter(pk=job.pk, attempt=job.attempt, status__in=_OPEN)
    return bool(ours.update(status=status, error=error, finished_at=timezone.now(), **fields))


def cancel_job(job: Job) -> None:
    """Ask a job to stop. One that nobody works on stops at once; a worker sees the flag at its next sign of life."""
    with transaction.atomic():
        held = Job.objects.select_for_update().get(pk=job.pk)
        if held.status in _OPEN:
            held.cancel_requested = True
            if held.status == Job.Status.QUEUED or is_silent(held):
                held.status, held.finished_at = Job.Status.CANCELLED, timezone.now()
            held.save(update_fields=["cancel_requested", "status", "finished_at"])
    job.refresh_from_db()


def adopt_jobs() -> list[Job]:
    """Jobs that have lost their worker or their message. Each is given to one caller alone."""
    now = timezone.now()
    lost = [job for job in Job.objects.filter(status__in=_OPEN).order_by("pk") if is_silent(job)]
    return [job for job in lost if _same(job).update(heartbeat_at=now, status=Job.Status.QUEUED)]


def _same(job: Job) -> QuerySet[Job]:
    """The job as it was seen; whoever changes its heartbeat has it."""
    return Job.objects.filter(pk=job.pk, status=job.status, heartbeat_at=job.heartbeat_at)


def files_in_use() -> set[str]:
    """Codes of the exports whose files are still offered, or are being written."""
    alive = Q(status__in=_OPEN) | Q(status=Job.Status.DONE, expires_at__gt=timezone.now())
    return set(Job.objects.filter(alive, kind=Job.Kind.EXPORT).values_list("code", flat=True))


def in_days(days: int) -> Any:
    return timezone.now() + timedelta(days=days)
