"""The jobs of a run, as its page and its JSON show them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.urls import reverse
from django.utils import timezone

from inspector.web.remedies import WORDS
from inspector.web.twins import Page, from_columns
from rollout_inspector.refusal import Words, worded
from rollouts.jobs import diagnosis
from rollouts.jobs.broker import queue_of
from rollouts.jobs.exports.exports import is_offered
from rollouts.store.jobs.activity import is_active, is_silent
from rollouts.store.jobs.jobs import JOB_KINDS, kind_of
from rollouts.store.models import Job, Run
from rollouts.worker.jobs import MAX_ATTEMPTS


def has_just_diagnosed(job: Job) -> bool:
    """The job diagnosed the run and ended in the last ten seconds, so the findings have changed."""
    ended = job.kind == diagnosis.KIND.slug and job.finished_at is not None
    return ended and timezone.now() - (job.finished_at or job.created_at) < timedelta(seconds=10)


def listed_kinds() -> list[str]:
    """The kinds of jobs that the page of a run lists. Its status tells of an import."""
    return [slug for slug, kind in JOB_KINDS.items() if kind.done is not None]


@dataclass(frozen=True)
class JobLine(Page):
    """A job as a line of the list."""

    code: str
    """Names the job in addresses."""
    kind: str
    """What ``Job.kind`` stores."""
    what: str
    """The kind and its options in words."""
    status: str
    """One of ``Job.Status``."""
    active: bool
    """The job still changes."""
    cancelling: bool
    """Somebody asked it to stop, and it has not stopped yet."""
    done: int
    """Trajectories that are done."""
    total: int
    """Trajectories that it has to go through."""
    sentence: str
    """Where it stands, and what to do where it does not go on."""
    notes: list[str]
    """Sentences about what was left out."""
    options: dict[str, Any]
    """What was asked for."""
    file: str | None
    """Address of the file of an export, while it is offered."""
    bytes: int
    """Size of that file."""
    created_at: datetime
    """When it was asked for."""
    created_by: str | None
    """Who asked for it; None also for the visitor of a share link."""
    finished_at: datetime | None
    """When it ended."""
    expires_at: datetime | None
    """When its file goes."""

    @classmethod
    def of(cls, job: Job, run: Run) -> JobLine:
        """A job of that run."""
        return from_columns(
            cls,
            job,
            what=what_of(job),
            active=is_active(job),
            cancelling=job.cancel_requested and is_active(job),
            sentence=sentence_of(job),
            notes=notes_of(job),
            file=reverse("job-file", kwargs={"code": run.code, "job": job.code}) if is_offered(job) else None,
            bytes=job.bytes_written,
            created_by=job.created_by.get_username() if run.makers_shown and job.created_by else None,
        )


def notes_of(job: Job) -> list[str]:
    """The sentences about what was left out. The first of a job is part of :func:`sentence_of`."""
    return list(job.notes[1:])


def what_of(job: Job) -> str:
    """The kind of a job and its options in words."""
    kind = kind_of(job)
    return kind.title + kind.details(job.options)


def sentence_of(job: Job, words: Words = WORDS) -> str:
    """The state of the job, and what to do when it does not go on, in the words of a page or of another door."""
    kind = kind_of(job)
    if kind.done is None:
        return worded(job.error, job.remedy, words) or job.progress
    done = f"{job.n_done:,} of {job.n_total:,} trajectories" if job.n_total else f"{job.n_done:,} trajectories"
    again = "Press the button again and it goes on where it was."
    if is_silent(job):
        if job.status == Job.Status.QUEUED:
            queue = queue_of(job) or "default"
            return f"No worker has taken it. Start the product (make run) or a worker of the queue {queue}. {again}"
        return f"It stopped after {done}: its worker gives no sign of life. Another one may take it up. {again}"
    if job.status == Job.Status.QUEUED:
        return "It waits for a worker."
    if job.status == Job.Status.RUNNING and job.error:
        return f"It broke off: {job.error} It is tried again: this is try {job.attempt} of {MAX_ATTEMPTS}."
    if job.status == Job.Status.RUNNING and job.n_total:
        return f"{done} done ({job.progress})." if job.progress else f"{done} done."
    if job.status == Job.Status.RUNNING:
        return f"{job.progress[:1].upper()}{job.progress[1:]}." if job.progress else "It has just begun."
    if job.status == Job.Status.FAILED:
        return worded(job.error, job.remedy, words) or "No reason was recorded; look into the worker’s log."
    return kind.cancelled.format(done=done) if job.status == Job.Status.CANCELLED else kind.done(job)
