"""What the API returns of trajectories: steps, rows, tokens, findings. The schema takes these docstrings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.urls import reverse

from inspector.html.inspector_tags import finding_title
from inspector.runs.pages import TrajectoryLine
from inspector.web.twins import Page, from_columns
from rollout_inspector.streams.figures import rows_per_call
from rollouts.store.models import StoredFinding, StoredTrajectory
from rollouts.store.trajectories.trajectory_parts import RowSummary, places_of


@dataclass(frozen=True)
class TrajectoriesPart(Page):
    """Part of the trajectories of a run."""

    items: list[TrajectoryLine]
    """In the order that was asked for."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class TrajectoryValues(Page):
    """A trajectory."""

    code: str
    """Names it in addresses."""
    url: str
    """Address of its page."""
    run: str
    """Code of its run."""
    index: int
    """Its position in its run."""
    external_id: str
    """Its name in the source."""
    group: str
    """Trajectories of one prompt share it."""
    status: str
    """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
    error: str
    """Why it failed; empty otherwise."""
    stop_reason: str
    """Why it ended, in the word of the source."""
    reward: float | None
    """Of the whole trajectory; null when there is none."""
    reward_parts: dict[str, Any]
    """Name of each part of the reward -> its value."""
    tokenizer: str | None
    """Name of the tokenizer of its run."""
    seed: int | None
    """Of a launch: what its sampling began with."""
    training_step: int | None
    """Of the trainer; null = not recorded."""
    steps: int
    """Engine calls."""
    rows: int
    """Training rows."""
    rows_per_call: float | None
    """Training rows for each engine call, two decimals; null without steps."""
    tokens: int
    """New tokens: deltas and completions."""
    sampled: int
    """Tokens that the model sampled."""
    trained: int
    """Tokens under the gradient."""
    lost: int | None
    """Sampled tokens that no row trains as they were sampled; null = not known."""
    findings: int
    """Findings of the diagnosis."""
    worst_severity: str
    """The gravest severity of its findings; empty without findings."""
    checks: dict[str, Any] | None
    """Check -> ``passed``, ``noted``, ``failed``, or the fields that it lacks; null = not known."""
    created_at: datetime
    """When it was stored."""
    finished_at: datetime | None
    """When it ended."""

    @classmethod
    def of(cls, trajectory: StoredTrajectory) -> TrajectoryValues:
        """A trajectory whose run and tokenizer are loaded."""
        run = trajectory.run
        return from_columns(
            cls,
            trajectory,
            run=run.code,
            url=reverse("trajectory", args=[trajectory.code]),
            rows_per_call=rows_per_call(trajectory.n_rows, trajectory.n_steps),
            tokenizer=run.tokenizer.name if run.tokenizer else None,
        )


@dataclass(frozen=True)
class StepValues(Page):
    """An engine call, without its tokens."""

    index: int
    """Its position in its trajectory."""
    row: int
    """The row that trains it."""
    parent: int | None
    """The earlier step whose stream its prompt shares the longest prefix with."""
    shared_length: int
    """Length of that prefix in tokens."""
    parent_length: int
    """Length of the parent's stream in tokens."""
    breaks: bool
    """Its prompt does not start with the whole stream of its parent."""
    prompt_length: int
    """Tokens that the engine read."""
    completion_length: int
    """Tokens that the engine sampled."""
    finish_reason: str
    """Why the completion ended."""
    stop_reason: str
    """What stopped it, in the word of the engine."""
    logprobs_mode: str
    """``raw``, ``processed``, or empty when nobody recorded it."""
    temperature: float | None
    """Of the sampling; null = not recorded."""
    top_p: float | None
    """Of the sampling; null = not recorded."""
    top_k: int | None
    """Of the sampling; null = not recorded."""
    engine: str
    """The engine and its version."""
    policy_version: str
    """The version of the weights."""


@dataclass(frozen=True)
class StepsPart(Page):
    """Part of the steps of a trajectory."""

    items: list[StepValues]
    """In their order."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class WholeStep(Page):
    """An engine call with what the source recorded beside its tokens."""

    step: StepValues
    """Its figures."""
    recorded: dict[str, Any]
    """Messages that are new at this step, tools, kwargs, reply, text and other fields; only those that are filled."""


@dataclass(frozen=True)
class RowValues(Page):
    """A training row, without its tokens."""

    index: int
    """Its position in its trajectory."""
    n_tokens: int
    """Its length."""
    n_trained: int
    """Tokens under the gradient."""
    follows_steps: bool
    """It is the stream of its last step; otherwise a trainer or a strategy wrote it."""
    steps: list[int]
    """The steps that it trains."""
    columns: list[str]
    """Names of the columns that a trainer wrote for it, or that engines told beside its tokens."""
    is_stored: bool
    """False: the row that the steps of an unfinished trajectory make so far."""

    @classmethod
    def of(cls, row: RowSummary, columns: dict[int, list[str]]) -> RowValues:
        """A row, and the names of the columns of each row."""
        named = columns.get(row.index, [])
        return cls(row.index, row.n_tokens, row.n_trained, row.follows_steps, sorted(row.steps), named,
                   row.key is not None)


@dataclass(frozen=True)
class RowList(Page):
    """The rows of a trajectory, as stored or as a strategy makes them."""

    items: list[RowValues]
    """In their order."""


@dataclass(frozen=True)
class TokenColumns(Page):
    """Tokens ``[start, stop)`` of a row or of the stream of a step; each list has ``stop - start`` values."""

    trajectory: str
    """Code of the trajectory."""
    start: int
    """Offset of the first token."""
    stop: int
    """Offset behind the last token; less than what was asked for where the answer would be too large."""
    n_tokens: int
    """Tokens of the whole row or stream."""
    next: int | None
    """What ``start`` takes for the following window; null at the end."""
    ids: list[int] | None
    """Token ids; null = not asked for, as for each list."""
    loss_mask: list[bool] | None
    """True = this token is under the gradient."""
    logprobs: list[float | None] | None
    """Sampling log-probability; null for a token that was not sampled, or was recorded without one."""
    origin: list[str] | None
    """``prompt``, ``sampled``, ``template``, ``observation`` or ``inserted``."""
    step: list[int | None] | None
    """The step that read or sampled the token; null = not known."""
    columns: dict[str, list[float | None]]
    """Name of a trainer's column, or of one that an engine told -> its values; null where the column has none."""


@dataclass(frozen=True)
class FindingValues(Page):
    """A finding of the diagnosis."""

    trajectory: str
    """Code of its trajectory."""
    number: int | None
    """Its number in its trajectory, from 1, in reading order; null in the list of a run."""
    kind: str
    """What it is."""
    title: str
    """The kind in words."""
    axis: str
    """Which part of the diagnosis found it."""
    severity: str
    """``error``, ``warning`` or ``info``."""
    step: int | None
    """The step that it is about."""
    row: int | None
    """The row that it is about."""
    start: int
    """Offset of its first token in the stream of the step, or in the row."""
    stop: int
    """Offset behind its last token."""
    places: list[tuple[int, int]]
    """Every stretch ``[start, stop)`` that it is about."""
    expected_text: str
    """What should stand there, as text."""
    actual_text: str
    """What stands there, as text."""
    evidence: str
    """What was seen, as a sentence."""
    remedy: str
    """What to do about it."""
    missing: str
    """The fields that the source lacks to decide it."""
    trained_tokens_lost: int | None
    """Sampled tokens that no row trains because of it; null = not known."""
    trained_tokens_wrong: int | None
    """Tokens that are trained and were not sampled; null = not known."""
    version: int
    """Of the diagnosis that made it."""
    muted: bool
    """The project knows findings of this kind in this run."""

    @classmethod
    def of(
        cls, finding: StoredFinding, trajectory: str, number: int | None = None, muted: Collection[str] = ()
    ) -> FindingValues:
        """A finding of the trajectory with that code. ``muted``: the kinds that are muted in its run."""
        return from_columns(
            cls,
            finding,
            trajectory=trajectory,
            number=number,
            title=finding_title(finding.kind),
            step=finding.step_index,
            row=finding.row_index,
            places=places_of(finding),
            muted=finding.kind in muted,
        )


@dataclass(frozen=True)
class FindingsPart(Page):
    """Part of a list of findings."""

    items: list[FindingValues]
    """In reading order for a trajectory, in the order of storing for a run."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class WholeFinding(Page):
    """A finding with its tokens."""

    finding: FindingValues
    """The finding."""
    expected_ids: list[int]
    """Token ids that should stand there."""
    actual_ids: list[int]
    """Token ids that stand there."""
