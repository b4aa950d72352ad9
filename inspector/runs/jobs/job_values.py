"""A job as pages and the API show it, and what pages show alike of a report that a job makes of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from django.urls import reverse
from django.utils import timezone

from inspector.runs.run_values import WorkValues
from inspector.web.remedies import WORDS
from inspector.web.twins import Page, from_columns
from rollout_inspector.refusal import Words, worded
from rollouts.jobs import diagnosis
from rollouts.jobs.broker import queue_of
from rollouts.jobs.exports.exports import is_offered
from rollouts.store.jobs.jobs import JOB_KINDS, is_active, is_silent, kind_of
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
class JobValues(WorkValues):
    """Background work."""

    kind: str
    """What is done."""
    what: str
    """The kind and its options in words."""
    active: bool
    """The job still changes."""
    cancelling: bool
    """Somebody asked it to stop, and it has not stopped yet."""
    run: str | None
    """Code of the run that it works on."""
    trajectory: str | None
    """Code of the trajectory that it works on."""
    check: str | None
    """Code of the template check that it answers."""
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
    created_by: str | None
    """Who asked for it; None also for the visitor of a share link."""
    expires_at: datetime | None
    """When its file goes."""

    @classmethod
    def of(cls, job: Job, run: Run) -> Self:
        """A job of that run, as its page shows it."""
        file = reverse("job-file", kwargs={"code": run.code, "job": job.code}) if is_offered(job) else None
        maker = job.created_by.get_username() if run.makers_shown and job.created_by else None
        return cls.with_subject(job, WORDS, run=run.code, file=file, created_by=maker)

    @classmethod
    def with_subject(cls, job: Job, words: Words, **subject: str | None) -> Self:
        """A job and what it works on, with the remedies in the words of a door. No query."""
        kind = kind_of(job)
        return from_columns(
            cls,
            job,
            what=kind.title + kind.details(job.options),
            active=is_active(job),
            cancelling=job.cancel_requested and is_active(job),
            error=worded(job.error, job.remedy, words),
            sentence=sentence_of(job, words),
            notes=list(job.notes[1:]),  # the first one is part of the sentence
            bytes=job.bytes_written,
            **{"run": None, "trajectory": None, "check": None, "created_by": None, **subject},
        )


@dataclass(frozen=True)
class ReportPage(Page):
    """A report that a job makes, or why there is none."""

    job: JobValues | None
    """The newest job that makes it."""
    live: bool
    """That job still changes."""
    why_not: str
    """Why it cannot be made; empty when it can."""
    stale: bool
    """The run has changed since the report was made."""
    made_at: datetime | None
    """When the report was made."""

    @classmethod
    def of(
        cls, run: Run, jobs: Sequence[Job], done: Job | None, key: Callable[[Run], str], why_not: str, /, **more: Any
    ) -> Self:
        """``jobs``: the newest first. ``done``: whose report is shown. ``key``: what a report of now would hold."""
        return cls(
            job=JobValues.of(jobs[0], run) if jobs else None, live=bool(jobs) and is_active(jobs[0]), why_not=why_not,
            stale=done is not None and (done.report or {})["key"] != key(run),
            made_at=done.finished_at if done is not None else None, **more,
        )


def sentence_of(job: Job, words: Words) -> str:
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
