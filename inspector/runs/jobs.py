"""The work done on a run after it ended, as its page and its JSON show it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.urls import reverse
from django.utils import timezone

from rollouts.models import Job, Run
from rollouts.selectors.activity import is_active, is_silent

MAX_JOBS = 10
LISTED = (Job.Kind.DIAGNOSE, Job.Kind.EXPORT, Job.Kind.REPLAY)
"""The kinds that the page of a run lists. An import is told by its run, and pushed trajectories by their findings."""


def latest_jobs(run: Run) -> list[Job]:
    """The newest first. One query."""
    return list(run.jobs.filter(kind__in=LISTED).select_related("created_by").order_by("-pk")[:MAX_JOBS])


def has_just_diagnosed(job: Job) -> bool:
    """Its end changed the findings of the run a moment ago."""
    ended = job.kind == Job.Kind.DIAGNOSE and job.finished_at is not None
    return ended and timezone.now() - (job.finished_at or job.created_at) < timedelta(seconds=10)


def is_offered(job: Job) -> bool:
    """There is a file to fetch."""
    return job.status == Job.Status.DONE and job.expires_at is not None and job.expires_at > timezone.now()


def job_values(job: Job, run: Run) -> dict[str, Any]:
    """A job as a line of the list."""
    where = {"code": run.code, "job": job.code}
    return {
        "code": job.code,
        "kind": job.kind,
        "what": _what(job),
        "status": job.status,
        "active": is_active(job),
        "cancelling": job.cancel_requested and is_active(job),
        "done": job.n_done,
        "total": job.n_total,
        "sentence": _sentence(job),
        "notes": [for_page(note) for note in job.notes[1:]],
        "options": job.options,
        "file": reverse("job-file", kwargs=where) if is_offered(job) else None,
        "bytes": job.bytes_written,
        "created_at": job.created_at,
        "created_by": job.created_by.get_username() if job.created_by else None,
        "finished_at": job.finished_at,
        "expires_at": job.expires_at,
    }


def for_page(sentence: str) -> str:
    """A refusal as the export form, and not the command line, would mend it."""
    for option, words in _WORDS.items():
        sentence = sentence.replace(option, words)
    return sentence


_WORDS = {
    "with --leave-out": "by choosing “leave out”",
    "with --force": "by choosing “write too”",
    "a --strategy": "a strategy",
}


def _what(job: Job) -> str:
    if job.kind == Job.Kind.DIAGNOSE:
        return "Judged again"
    if job.kind == Job.Kind.REPLAY:
        return "Replayed under every strategy"
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
    return ", ".join(parts)


def _sentence(job: Job) -> str:
    """Where the job stands, and the way out where it does not go on."""
    done = f"{job.n_done:,} of {job.n_total:,} trajectories"
    again = "Press the button again and it goes on where it was."
    if is_silent(job):
        if job.status == Job.Status.QUEUED:
            return f"No worker has taken it. Start the product (make run) or a worker of the queue default. {again}"
        return f"It stopped after {done}: its worker gives no sign of life. Another one may take it up. {again}"
    if job.status == Job.Status.QUEUED:
        return "It waits for a worker."
    if job.status == Job.Status.RUNNING:
        return f"{done} done." if job.n_total else "It has just begun."
    if job.status == Job.Status.FAILED:
        return for_page(job.error) or "No reason was recorded; look into the worker’s log."
    if job.kind == Job.Kind.DIAGNOSE:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}: these have new findings, the others keep the old ones."
        return f"{job.n_done:,} trajectories judged."
    if job.kind == Job.Kind.REPLAY:
        if job.status == Job.Status.CANCELLED:
            return f"Cancelled after {done}; nothing is shown of it."
        return f"{job.n_done:,} trajectories replayed; the cost page shows what each strategy would have made of them."
    if job.status == Job.Status.CANCELLED:
        return f"Cancelled after {done}; there is no file."
    if not is_offered(job):
        return "Its file has expired. Export it again."
    return " ".join([f"{job.n_written:,} written.", *job.notes[:1]])
