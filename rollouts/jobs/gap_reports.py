"""The gap of a run between trainer and sampler: a worker reads all rows, names the causes and stores the report."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.diagnose.gap.report import VERSION, gap_report
from rollout_inspector.diagnose.gap.token_classes import TokenClasses
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import is_teacher
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs.broker import DO_JOB, send_task
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, delete_earlier_jobs, end_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.logprob_columns import (
    RECENT, SAMPLER, columns_of, has_gap, load_compared, newest_noise, newest_report, passes_of, trajectories_with_gap
)
from rollouts.store.runs.runs import run_of_job
from rollouts.store.text import storable_text, without_paths
from rollouts.store.trajectories.findings import kinds_by_row
from rollouts.store.trajectories.trajectories import trajectories_by_key

BATCH_TOKENS = 1_000_000  # Stored tokens that are in memory at a time beside what is gathered.
MAX_TOKENS = 20_000_000
"""Trained tokens that one report reads. Of a larger run every second, third, ... trajectory is read."""
GROWTH = 1.5
"""A run that is pushed to is read again when it has grown by this factor: all reads together cost three of the last."""


def gap_key(run: Run) -> str:
    """The hash of all that the report of a run depends on."""
    parts = (
        VERSION, run.n_trajectories, run.n_finished, run.n_steps, run.n_tokens, run.diagnosis_version,
        run.tokenizer_id, sorted(run.finding_counts.items()), *passes_of(run), newest_noise(run),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def why_no_gap(run: Run) -> str:
    """A sentence that says why a run has no gap to read; empty = it has one. One query."""
    if not run.n_trajectories:
        return "This run holds no trajectory."
    if has_gap(run):
        return ""
    return (
        "No row of this run has log-probabilities of both sampler and trainer, each as long as its ids. The trainer's "
        "are read from a column such as prev_logprobs, trainer_logprobs or old_log_probs."
    )


def why_no_columns(run: Run, sampler: str = "", trainer: str = "") -> str:
    """A sentence that says why two columns of a run cannot be compared; empty = they can. A few queries."""
    if not trainer and sampler in ("", SAMPLER):
        return why_no_gap(run)
    names = [column.name for column in columns_of(run)]
    for name in (sampler or SAMPLER, trainer):
        if name and name not in names:
            listed = ", ".join(names) or "none"
            return f"The run has no column of log-probabilities named {name[:80]!r}. It has: {listed}."
    return "" if trainer else "Name the column that stands for the trainer, too."


def read_gap(
    run: Run, say: Callable[[int, int], object] = lambda done, total: None, sampler: str = "", trainer: str = "",
    teacher: bool = False,
) -> dict[str, Any]:
    """The report of :func:`rollout_inspector.diagnose.gap.report.gap_report` over the finished trajectories of a run.

    ``sampler`` and ``trainer`` are names of :func:`columns_of`; empty = as recorded. ``teacher``: the second is that of
    a teacher, as one is whose name says so.

    Also ``key``, ``finished`` (trajectories that the run had), ``compared`` (both names), ``trajectories`` (how many
    were read), ``every`` (1 = all were read, 2 = every second ...) and ``notes``. ``say`` is called with the
    trajectories that are read, and how many there are.
    """
    codec, notes = _codec_of(run)
    replays, masses = passes_of(run)
    more = [name for replay in replays for name in (replay.prefill, replay.decode)]
    collector = GapCollector(classes=TokenClasses(codec) if codec is not None else None, more=more, kept=masses)
    keys, trained, n_without = trajectories_with_gap(run, recorded=not trainer)
    if n_without:
        who = "1 trajectory has" if n_without == 1 else f"{n_without:,} trajectories have"
        lack = "no row with log-probabilities of both sides, each as long as its ids"
        notes.append(f"{who} {lack}; nothing is compared there.")
    every = max(1, math.ceil(trained / MAX_TOKENS))
    keys = keys[::every]
    done = 0
    for batch in batched(keys, BATCH_TOKENS, lambda one: max(one[1] or 0, BATCH_TOKENS // 200)):
        trajectories = trajectories_by_key([key for key, _ in batch])
        kinds = kinds_by_row(trajectories)
        values = load_compared(trajectories, sampler or SAMPLER, trainer, [*more, masses])
        for record, value in zip(trajectories, values, strict=True):
            collector.add(value, enumerate(value.rows), record.code, kinds[record.pk])
        done += len(batch)
        say(done, len(keys))
    noise, tokens = newest_noise(run), collector.done()
    if noise is not None and noise["tokens"]:
        tokens = replace(tokens, noise=(noise["mean_abs"], noise["p99"]))
    report = gap_report(tokens, replays, teacher or is_teacher(trainer))
    if every > 1:
        notes.append(
            f"The run trains {trained:,} tokens, more than the {MAX_TOKENS:,} that one report reads: one trajectory of "
            f"{every} was read."
        )
    if codec is not None:
        _add_text(report, codec)
    return {
        **report,
        "key": gap_key(run),
        "finished": run.n_finished,
        "compared": [sampler or SAMPLER, trainer],
        "trajectories": done,
        "every": every,
        "notes": notes,
        "noise": noise,
    }


def do_job(job: Job, beat: Beat) -> None:
    """Read the gap of a run and store the report. The earlier one goes, of a trainer or of a teacher alike."""
    run = run_of_job(job)
    columns = {side: job.options.get(side, "") for side in ("sampler", "trainer")}
    if sentence := why_no_columns(run, **columns):
        raise Refusal(sentence)
    teacher = bool(job.options.get("teacher"))
    beat(n_done=0, n_total=run.n_finished)
    report = read_gap(
        run, lambda done, total: beat.now_and_then(n_done=done, n_total=total), **columns, teacher=teacher
    )
    if not end_job(job, Job.Status.DONE, report=report, n_done=report["trajectories"]):
        raise JobLost
    delete_earlier_jobs(job, "teacher")


def ask_for_gap(run: Run, user: Any = None, grows: bool = False) -> None:
    """Ask a worker to read the gap of a run that has changed, so that its causes are known without a press.

    ``grows``: more is pushed to the run, which is read again when it has grown by ``GROWTH``. Nothing happens where no
    row has both columns, where the report is up to date, or where somebody compared other columns. A teacher's column
    takes the place of the trainer's where that is missing. If the broker does not answer, the job waits for a worker.
    """
    options: dict[str, Any] = {}
    if not (has_gap(run, RECENT) if grows else not why_no_gap(run)):
        teachers = [] if grows else [column.name for column in columns_of(run) if is_teacher(column.name)]
        if not teachers:
            return
        options = gap_options(trainer=teachers[0])
    if (last := newest_report(run)) is not None:
        key, finished, trainer = last
        little = grows and finished <= run.n_finished < GROWTH * finished
        if trainer or little or key == gap_key(run):
            return
    job, is_new = ask_job(run, KIND.slug, options, user)
    if is_new:
        send_task(DO_JOB, job.pk)


def gap_options(sampler: str = "", trainer: str = "", teacher: bool = False) -> dict[str, Any]:
    """The options of a job that compares two columns; empty = as recorded. ``teacher``: see :func:`read_gap`."""
    columns = {name: column for name, column in (("sampler", sampler), ("trainer", trainer)) if column}
    return columns | ({"teacher": True} if trainer and (teacher or is_teacher(trainer)) else {})


def _codec_of(run: Run) -> tuple[LoadedTokenizer | None, list[str]]:
    if run.tokenizer is None:
        return None, ["The run has no tokenizer, so tokens have no text and no class."]
    try:
        return load_tokenizer(run.tokenizer.files_sha256), []
    except (ValueError, OSError) as error:
        return None, [without_paths(f"Tokens have no text and no class, because the tokenizer cannot be used: {error}")]


def _add_text(report: dict[str, Any], codec: LoadedTokenizer) -> None:
    """The text of each token that the report names, at most 40 characters."""
    tokens = [*report["ids"], *report["worst"], *(cause["example"] for cause in report["causes"])]
    pieces = codec.token_bytes(np.array([token["id"] for token in tokens], np.int32))
    for token, piece in zip(tokens, pieces, strict=True):
        token["text"] = storable_text(piece.decode("utf-8", "replace"))[:40]


KIND = JobKind(
    "gap",
    "Causes of the gap between trainer and sampler",
    do_job,
    activity="gap computation started",
    page="run-gap",
    done=lambda job: f"{job.n_done:,} trajectories read; the page of the gap names the causes.",
)
"""The gap between trainer and sampler is read over a run; ``report`` names the causes."""
