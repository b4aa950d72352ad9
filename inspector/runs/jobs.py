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
from rollouts.jobs.sending import queue_of
from rollouts.store.jobs.activity import is_active, is_silent
from rollouts.store.models import Job, Run
from rollouts.worker.jobs import MAX_ATTEMPTS


def has_just_diagnosed(job: Job) -> bool:
    """The job diagnosed the run and ended in the last ten seconds, so the findings have changed."""
    ended = job.kind == Job.Kind.DIAGNOSE and job.finished_at is not None
    return ended and timezone.now() - (job.finished_at or job.created_at) < timedelta(seconds=10)


def is_offered(job: Job) -> bool:
    """The job is an export whose file can be downloaded."""
    return job.status == Job.Status.DONE and job.expires_at is not None and job.expires_at > timezone.now()


@dataclass(frozen=True)
class JobLine(Page):
    """A job as a line of the list."""

    code: str
    """Names the job in addresses."""
    kind: str
    """One of ``Job.Kind``."""
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
    if job.kind == Job.Kind.DIAGNOSE:
        return "Diagnosed again"
    if job.kind == Job.Kind.DIAGNOSE_PUSHED:
        return "Diagnosis of what was pushed"
    if job.kind == Job.Kind.REPLAY:
        return "Replayed under every strategy"
    if job.kind == Job.Kind.LOSS_WEIGHTS:
        return "Weights in the loss" + (", also under every strategy" if job.options.get("strategies") else "")
    if job.kind == Job.Kind.RESCORE:
        at = f" at temperature {job.options['temperature']:g}" if "temperature" in job.options else ""
        return f"Scored with {job.options['model']} on {job.options['engine']}{at}"
    if job.kind == Job.Kind.GAP:
        return "Causes of the gap between trainer and sampler"
    options = job.options
    parts = [f"Export as {options.get('format', 'own_jsonl').replace('_', ' ')}"]
    if options.get("strategy"):
        parts.append(f"rows of {options['strategy'].replace('_', ' ')}")
    if options.get("pad_to"):
        parts.append(f"padded to {options['pad_to']:,} with id {options.get('pad_id', 0)}")
    if options.get("force"):
        parts.append("faulty rows too")
    if options.get("leave_out"):
        parts.append("faulty trajectories left out")
    if only := options.get("only"):
        parts.append("only " + ", ".join(f"{name} {value}".replace("_", " ") for name, value in only.items()))
    return ", ".join(parts)


def sentence_of(job: Job, words: Words = WORDS) -> str:
    """The state of the job, and what to do when it does not go on, in the words of a page or of another door."""
    done = f"{job.n_done:,} of {job.n_total:,} trajectories"
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
    if job.status == Job.Status.RUNNING:
        parts = f" ({job.progress})" if job.progress else ""
        if job.kind == Job.Kind.RESCORE and not job.report:
            return "The engine is started."
        return f"{done} done{parts}." if job.n_total else "It has just begun."
    if job.status == Job.Status.FAILED:
        return worded(job.error, job.remedy, words) or "No reason was recorded; look into the worker’s log."
    if job.kind == Job.Kind.DIAGNOSE:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}: these have new findings, the others keep the old ones."
        return f"{job.n_done:,} trajectories diagnosed."
    if job.kind == Job.Kind.REPLAY:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}; nothing is shown of it."
        return f"{job.n_done:,} trajectories replayed; the cost page shows what each strategy would have made of them."
    if job.kind == Job.Kind.LOSS_WEIGHTS:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}; nothing is shown of it."
        return f"{job.n_done:,} trajectories counted; the page Weights shows what each loss makes of their tokens."
    if job.kind == Job.Kind.RESCORE:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}. The column is shown when all are scored: press Score again to go on."
        return " ".join(job.notes[:1])
    if job.kind == Job.Kind.GAP:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}; nothing is shown of it."
        return f"{job.n_done:,} trajectories read; the page of the gap names the causes."
    if job.kind == Job.Kind.DIAGNOSE_PUSHED:
        return f"Cancelled after {job.n_done:,} trajectories. Diagnose again brings the findings of the others."
    if job.status == Job.Status.CANCELLED:
        return f"Cancelled after {done}; there is no file."
    if not is_offered(job):
        return "Its file has expired. Export it again."
    return " ".join([f"{job.n_written:,} written.", *job.notes[:1]])
