"""Pushes of a trainer: read in any importable format, named, and stored if the run does not have them yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Rejected, Source, TooLarge, limits
from rollout_inspector.formats.training_step import ANY, TrainingStepRule
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs.broker import send_job
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run
from rollouts.store.runs.imports import add_rejections
from rollouts.store.trajectories.save_trajectories import add_new_trajectories, differing, named_by_content, note_push

BATCH_TRAJECTORIES = 50
BATCH_TOKENS = 1_000_000  # A batch is one transaction. It ends when the first of the two limits is reached.
MAX_NAME = 200
MAX_LISTED = 1000  # Rejected lines that an answer lists. All rejected lines are counted.


@dataclass
class Pushed:
    """The result of one push."""

    run: str
    """Code of the run."""
    trajectories: int = 0
    """Trajectories that this push stored."""
    known: int = 0
    """Trajectories that were left as they were, because the run had their ids."""
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """The first lines that could not be read, each with ``line`` and ``reason``."""
    n_rejected: int = 0
    """Number of lines that could not be read."""
    error: str | None = None
    """Why nothing after some place could be read; None = everything was read."""
    notice: str | None = None
    """What the sender should know."""
    is_too_large = False
    """Whether ``error`` tells of a limit. No part of the answer: its status says so."""

    def reject(self, run: Run, rejected: Sequence[Rejected]) -> None:
        """Count lines that could not be read, and keep their reasons with the run."""
        add_rejections(run, "pushed", rejected)
        self.n_rejected += len(rejected)
        room = MAX_LISTED - len(self.rejected)
        self.rejected += [{"line": line.line, "reason": line.reason} for line in rejected[:room]]


def take_push(run: Run, source: Source, format_name: str, prefix: str, training_step: TrainingStepRule = ANY) -> Pushed:
    """Store the trajectories of a source. Each id gets ``prefix`` before it, and is stored once in the run. Raises
    :class:`FileRefused` when nothing of the source can be read. If the source is damaged in the middle, ``error`` says
    so, and what stands before the damage is stored: a second push finds these ids known."""
    with limits.reading(limits.PUSH):
        return _take(run, source, format_name, prefix, training_step)


def _take(run: Run, source: Source, format_name: str, prefix: str, training_step: TrainingStepRule) -> Pushed:
    chosen, items = formats.read(source, format_name, training_step)
    pushed = Pushed(run.code)
    table = byte_table_of(run)
    others: list[str] = []
    try:
        for batch in batched(items, BATCH_TOKENS, _weight):
            items_in_run = [item if isinstance(item, Rejected) else _named(item, prefix) for item in batch]
            trajectories = [item for item in items_in_run if isinstance(item, Trajectory)]
            stored, stored_before = add_new_trajectories(run, trajectories, table)
            pushed.trajectories += len(stored)
            pushed.known += len(stored_before)
            others += differing(run, stored_before) if stored_before else []
            pushed.reject(run, [item for item in items_in_run if isinstance(item, Rejected)])
            limits.current().check_rejected(pushed.n_rejected)
    except FileRefused as error:
        pushed.reject(run, [Rejected(None, str(error))])
        pushed.error, pushed.is_too_large = str(error), isinstance(error, TooLarge)
    note_push(run, chosen.name)
    notices = []
    if others:
        notices.append(
            f"Known ids came with other tokens, another reward or another training step, {len(others):,} in all, "
            f"{others[0]!r} first, and were left as they are. Ids that repeat, as in each step of training, need "
            "?prefix=."
        )
    if pushed.trajectories:
        # The diagnosis needs a tokenizer and time, so a worker makes it.
        job, is_new = ask_job(run, "diagnose_pushed", user=run.created_by)
        if is_new and (sentence := send_job(job)):
            notices.append(
                f"The trajectories are stored without findings. {sentence} `manage.py diagnose {run.code}` makes them."
            )
    pushed.notice = " ".join(notices) or None
    return pushed


def _weight(item: Trajectory | Rejected) -> int:
    """The weight in tokens, with a least weight: many small items fill a batch too."""
    if isinstance(item, Rejected):
        return BATCH_TOKENS // MAX_LISTED
    return max(item.n_ids, BATCH_TOKENS // BATCH_TRAJECTORIES)


def _named(trajectory: Trajectory, prefix: str) -> Trajectory | Rejected:
    """The trajectory under its name in the run. A trajectory without an id is named by its content."""
    if formats.is_named_by_line(trajectory):
        trajectory = named_by_content(trajectory)
    if not prefix:
        return trajectory
    name, group = f"{prefix}{trajectory.external_id}", trajectory.group and f"{prefix}{trajectory.group}"
    if max(len(name), len(group)) > MAX_NAME:
        return Rejected(None, f"With the prefix the id {trajectory.external_id!r} is over {MAX_NAME} characters.")
    return replace(trajectory, external_id=name, group=group)
