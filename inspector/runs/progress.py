"""How far a run is, and why it makes no progress."""

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from inspector.server.health import PATIENCE_SECONDS, has_worker
from rollouts.jobs.broker import engine_queue
from rollouts.store.jobs.jobs import is_active, is_silent, latest_jobs
from rollouts.store.models import Run
from rollouts.store.runs.imports import has_partial_file, is_read_in_parts
from rollouts.store.runs.launched_runs import QUIET_SECONDS
from rollouts.worker.jobs import MAX_ATTEMPTS

PARTIAL = (
    "A part of the file that is being read is shown already. It is taken out again if the file cannot be read to its "
    "end."
)
IN_PARTS = (
    "Workers read parts of the files. What is read is shown already. Lines that cannot be read are listed when all "
    "parts are read; a file that cannot be read to its end is taken out again then."
)


def _queue_of(run: Run) -> str:
    return engine_queue(run.model) if run.kind == Run.Kind.LAUNCH else "default"


def waiting_sentence(run: Run, now: datetime) -> str:
    """Why the run makes no progress, and what to do; empty while all is well."""
    if run.status == Run.Status.QUEUED and (now - run.created_at).total_seconds() > PATIENCE_SECONDS:
        queue = _queue_of(run)
        lives = has_worker(queue)
        if lives:
            return "A worker is alive but has not taken this run yet: it is busy with another one, or still loading."
        way_out = (
            f"Start the product (make run) or a worker alone (celery -A inspector worker -Q {queue}); the run begins "
            "by itself as soon as one is there."
        )
        if lives is None:
            return f"No worker has taken this run yet, and Redis does not answer, or has no memory left. {way_out}"
        return f"No worker has taken this run yet: none serves the queue {queue}. {way_out}"
    if run.status == Run.Status.RUNNING:
        if run.kind != Run.Kind.LAUNCH:
            return _import_sentence(run)
        last = run.heartbeat_at or run.started_at
        if last and (now - last).total_seconds() > QUIET_SECONDS:
            since = f"{timezone.localtime(last):%H:%M:%S %Z}"
            return f"No worker has reported on this run since {since}. {_what_follows(run)}"
    return ""


def _import_sentence(run: Run) -> str:
    """Why an import makes no progress; empty while all is well, and for a run that is recorded."""
    for job in filter(is_active, latest_jobs(run, "import")[:1]):
        if is_silent(job):
            way_out = (
                "goes on at the file that was being read"
                if has_worker("default")
                else "goes on as soon as one runs: make run, or celery -A inspector worker -Q default"
            )
            return f"{job.error} Its worker gives no sign of life. A worker of the queue default {way_out}.".strip()
        if job.error:
            return f"It broke off: {job.error} It is tried again: this is try {job.attempt} of {MAX_ATTEMPTS}."
    return ""


def _what_follows(run: Run) -> str:
    """Which worker goes on with a run whose worker is silent, and when."""
    stored = "Stored steps are kept, none is sampled twice."
    queue = _queue_of(run)
    lives = has_worker(queue)
    if lives:
        return (
            f"A worker of the queue {queue} lives and takes it over within half a minute of that, or as soon as it has "
            f"a free place. {stored}"
        )
    if lives is None:
        return (
            f"Redis does not answer, or has no memory left: mend it, and start a worker on the queue {queue}, or press "
            f"Resume then. {stored}"
        )
    return (
        f"None serves the queue {queue} now. Start the product (make run) or a worker alone (celery -A inspector "
        f"worker -Q {queue}): it goes on by itself. {stored}"
    )


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    active: bool  # The run still changes.
    unit: str  # What ``done`` and ``total`` count: ``trajectories`` of a launch, ``bytes`` of an import.
    done: int
    total: int
    elapsed_seconds: float
    tokens_per_second: float | None  # Sampled by a launch, read by an import; None in the first half second.
    remaining_seconds: float | None  # None when the pace is not known.
    waiting: str  # Why the run makes no progress, and what to do; empty while all is well.
    partial: str  # What of the files is not shown yet, or may go again; empty = nothing.
    starting: bool  # A worker has begun a launch, and no step is stored yet.
    running: int  # Trajectories of a launch that are under way.
    queued: int  # Trajectories of a launch that no worker has begun.


def progress(run: Run, running: int = 0, now: datetime | None = None) -> Progress:
    """How far a run is. ``running``: the number of its trajectories that are under way."""
    now = now or timezone.now()
    launch = run.kind == Run.Kind.LAUNCH
    finished = run.n_ended
    done, total = (finished, run.n_expected) if launch else (run.bytes_done, run.bytes_total)
    end = run.finished_at or now
    elapsed = max((end - run.started_at).total_seconds(), 0.0) if run.started_at else 0.0
    active = is_active(run)
    # The first few do not count, because their time includes loading the model or the tokenizer.
    has_pace = active and done and total / 20 <= done <= total
    return Progress(
        active=active, unit="trajectories" if launch else "bytes", done=done, total=total,
        elapsed_seconds=round(elapsed, 1),
        tokens_per_second=round((run.n_sampled if launch else run.n_tokens) / elapsed, 1) if elapsed > 0.5 else None,
        remaining_seconds=round(elapsed / done * (total - done), 1) if has_pace else None,
        waiting=waiting_sentence(run, now) if active else "",
        partial=IN_PARTS if is_read_in_parts(run) else PARTIAL if has_partial_file(run) else "",
        starting=launch and run.status == Run.Status.RUNNING and not run.n_steps, running=running,
        queued=max(run.n_trajectories - finished - running, 0) if launch and active else 0,
    )
