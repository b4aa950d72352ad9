"""What the pages of runs say about a run: its progress, its findings by kind, and why it has no text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils import timezone

from inspector.html.inspector_tags import plural
from inspector.runs.filters import ListQuery
from inspector.server.health import PATIENCE_SECONDS, has_worker
from rollout_inspector.streams.figures import percent_of
from rollouts.jobs.broker import engine_queue
from rollouts.store.jobs.activity import is_active, is_silent
from rollouts.store.jobs.jobs import latest_jobs
from rollouts.store.models import Run
from rollouts.store.parameters import SEVERITIES
from rollouts.store.runs.gallery import KEY, TRAINING_KEY
from rollouts.store.runs.imports import has_partial_file, is_read_in_parts
from rollouts.store.runs.launched_runs import QUIET_SECONDS
from rollouts.store.runs.run_summary import RunSummary
from rollouts.store.trajectories.groups import GroupStats
from rollouts.store.trajectories.pushed_trajectories import DIAGNOSED_TO
from rollouts.worker.jobs import MAX_ATTEMPTS

BOOKKEEPING = (
    "files", "format", "use_recorded_tokenizer", "imported", "tool_calls_note", KEY, TRAINING_KEY, DIAGNOSED_TO,
)
"""Settings that only the program needs."""

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
            return f"No worker has taken this run yet, and Redis does not answer. {way_out}"
        return f"No worker has taken this run yet: none serves the queue {queue}. {way_out}"
    if run.status == Run.Status.RUNNING:
        if run.kind != Run.Kind.LAUNCH:
            return _import_sentence(run)
        last = run.heartbeat_at or run.started_at
        if last and (now - last).total_seconds() > QUIET_SECONDS:
            return f"{_since(last)} {_what_follows(run)}"
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


def _since(last: datetime) -> str:
    return f"No worker has reported on this run since {timezone.localtime(last):%H:%M:%S %Z}."


def _what_follows(run: Run) -> str:
    """Which worker goes on with a run whose worker is silent, and when."""
    kept = "Stored steps are kept, none is sampled twice."
    queue = _queue_of(run)
    lives = has_worker(queue)
    if lives:
        return (
            f"A worker of the queue {queue} lives and takes it over within half a minute of that, or as soon as it has "
            f"a free place. {kept}"
        )
    if lives is None:
        return f"Redis does not answer: start it again, and a worker on the queue {queue}, or press Resume then. {kept}"
    return (
        f"None serves the queue {queue} now. Start the product (make run) or a worker alone (celery -A inspector "
        f"worker -Q {queue}): it goes on by itself. {kept}"
    )


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    active: bool
    """The run still changes."""
    unit: str
    """What ``done`` and ``total`` count: ``trajectories`` of a launch, ``bytes`` of an import."""
    done: int
    total: int
    elapsed_seconds: float
    tokens_per_second: float | None
    """Sampled by a launch, read by an import; None in the first half second."""
    remaining_seconds: float | None
    """None when the pace is not known."""
    waiting: str
    """Why the run makes no progress, and what to do; empty while all is well."""
    partial: str
    """What of the files is not shown yet, or may go again; empty = nothing."""
    starting: bool
    """A worker has begun a launch, and no step is stored yet."""
    running: int
    """Trajectories of a launch that are under way."""
    queued: int
    """Trajectories of a launch that no worker has begun."""


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
        active=active,
        unit="trajectories" if launch else "bytes",
        done=done,
        total=total,
        elapsed_seconds=round(elapsed, 1),
        tokens_per_second=round((run.n_sampled if launch else run.n_tokens) / elapsed, 1) if elapsed > 0.5 else None,
        remaining_seconds=round(elapsed / done * (total - done), 1) if has_pace else None,
        waiting=waiting_sentence(run, now) if active else "",
        partial=IN_PARTS if is_read_in_parts(run) else PARTIAL if has_partial_file(run) else "",
        starting=launch and run.status == Run.Status.RUNNING and not run.n_steps,
        running=running,
        queued=max(run.n_trajectories - finished - running, 0) if launch and active else 0,
    )


@dataclass(frozen=True)
class Choice:
    """A line of a breakdown. Pressing it filters the list."""

    name: str
    count: int
    most: int
    query: str
    """Empty when the list cannot be filtered by it."""
    chosen: bool
    notes: tuple[str, ...] = ()
    severity: str = ""
    """The worst severity of its findings."""
    muted: bool = False
    """Of a kind of finding: the project knows it in this run."""


def finding_choices(
    summary: RunSummary, wanted: ListQuery, n_ended: int, muted: Collection[str] = ()
) -> list[Choice]:
    """Findings by kind: errors, then warnings, then notes, and of each severity the one that costs most first.

    ``n_ended``: the trajectories that ended. ``muted``: the kinds that are muted in the run, which come last.
    """
    most = max(summary.finding_counts.values(), default=0)
    choices = []
    for kind, count in summary.finding_counts.items():
        severities = summary.finding_severities.get(kind, {})
        n, tokens = summary.finding_trajectories.get(kind, 0), summary.finding_tokens.get(kind, 0)
        one_row = summary.finding_one_row.get(kind, 0)
        notes = [f"{plural(n, 'trajectory,trajectories')}, {percent_of(n, n_ended)}"] if 0 < n <= n_ended else []
        if len(severities) > 1:
            notes.append(" and ".join(severity_count(severity, n) for severity, n in severities.items()))
        if tokens is None:
            notes.append("tokens lost or wrong: not known")
        elif tokens:
            notes.append(f"{plural(tokens, 'token')} lost or wrong")
        if one_row:
            notes.append(f"{plural(one_row, 'token')} would be lost in one row")
        choices.append(
            Choice(
                kind,
                count,
                most,
                wanted.query(finding="" if wanted.kind == kind else kind),
                wanted.kind == kind,
                tuple(notes),
                next(iter(severities), ""),
                kind in muted,
            )
        )

    def place(choice: Choice) -> tuple[bool, int, int, int, int]:
        tokens, one_row = summary.finding_tokens.get(choice.name) or 0, summary.finding_one_row.get(choice.name, 0)
        severity = SEVERITIES.index(choice.severity) if choice.severity else 9
        return choice.muted, severity, -tokens, -one_row, -choice.count

    return sorted(choices, key=place)


def severity_count(severity: str, n: int) -> str:
    """`1 error`, `2 warnings`, `3 notes`."""
    return plural(n, "note" if severity == "info" else severity)


def findings_sentences(summary: RunSummary) -> list[tuple[str, str]]:
    """(severity, sentence): the number of trajectories with each worst severity."""
    counts = summary.severities
    clean = counts.get("", 0) if set(summary.by_status) == {"done"} else 0
    said = [
        ("error", counts.get("error", 0), "with an error"),
        ("warning", counts.get("warning", 0), "with a warning and no error"),
        ("info", counts.get("info", 0), "with only notes"),
        ("", clean, "without a finding" + " in what was checked" * any(one.not_decidable for one in summary.checks)),
    ]
    held = [one for one in said if one[1]]
    return [
        (severity, f"{plural(n, 'trajectory,trajectories') if place == 0 else format(n, ',')} {words}")
        for place, (severity, n, words) in enumerate(held)
    ]


def stop_choices(summary: RunSummary, wanted: ListQuery) -> list[Choice]:
    """Why trajectories ended, the most frequent first.

    Trajectories that have not ended are left out. Failed and cancelled ones have no stop reason: their status counts.
    """
    cut = {name: summary.by_status.get(name, 0) for name in ("failed", "cancelled")}
    unfinished = sum(summary.by_status.get(status, 0) for status in ("queued", "running"))
    counts = dict(summary.stop_reasons)
    if "" in counts:
        counts[""] = max(counts[""] - unfinished - sum(cut.values()), 0)
    ends = [("stop", name, count, wanted.stop_reason) for name, count in counts.items()]
    ends += [("status", name, count, wanted.status) for name, count in cut.items()]
    ends = sorted((end for end in ends if end[2]), key=lambda end: -end[2])
    return [
        Choice(
            name,
            count,
            ends[0][2],
            wanted.query(**{parameter: "" if chosen == name else name}) if name else "",
            bool(name) and chosen == name,
        )
        for parameter, name, count, chosen in ends
    ]


def is_flat(group: GroupStats, live: bool) -> bool:
    """The group teaches nothing: all rewards are equal, and none is still to come."""
    return group.has_no_signal and not (live and group.n_rewards < group.n)


def tokenizer_note(run: Run, summary: RunSummary) -> str:
    """A sentence when the run has no tokenizer, or probably a wrong one; empty otherwise."""
    if is_active(run) or not run.n_tokens:
        return ""
    if run.tokenizer is None:
        return "No tokenizer: ids are shown as ids, and findings that need text are left open as “Not decidable”."
    if summary.finding_trajectories.get("token_ids_missing") == run.n_trajectories:
        return (
            f"Every trajectory has ids that are missing or outside the vocabulary of the tokenizer "
            f"“{run.tokenizer.name}”. Is it the tokenizer of this model?"
        )
    return ""


def settings_words(settings: Mapping[str, Any], labels: Mapping[str, str]) -> list[tuple[str, Any]]:
    """The settings of a launch as pairs of label and value. Nested values are JSON."""
    return [
        (labels.get(key) or key.replace("_", " ").capitalize(), _word(key, value))
        for key, value in settings.items()
        # Engine and templates are columns of the run. The settings hold only the wish, which may be empty.
        if key not in (*BOOKKEEPING, "engine", "chat_template", "rows_chat_template")
        and value not in ("", [], {}, None)
    ]


def _word(key: str, value: Any) -> Any:
    if key in ("compare", "strategy"):
        return str(value).replace("_", " ")
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
