"""What the API returns of trajectories: steps, rows, tokens, findings. The schema takes these docstrings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from inspector.html.inspector_tags import finding_title
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.web.twins import Page, from_columns, some_fields
from rollouts.store.models import StoredFinding
from rollouts.store.trajectories.trajectory_parts import RowSummary, places_of

TrajectoryAnswer: Any = some_fields(
    TrajectoryValues, "TrajectoryValues", "A trajectory.",
    "code url run index external_id group status error stop_reason reward reward_parts tokenizer seed training_step "
    "steps rows rows_per_call tokens sampled trained lost findings worst_severity checks created_at finished_at",
)
TrajectoryLine: Any = some_fields(
    TrajectoryValues, "TrajectoryLine", "A trajectory as a line of its run's list.",
    "code url index external_id group group_url status error stop_reason prompt_line answer_line reward reward_parts "
    "training_step steps rows rows_per_call tokens sampled trained findings worst_severity kinds not_checked comments "
    "open_comments seen zero_variance",
)
FoundTrajectory: Any = some_fields(
    TrajectoryValues, "FoundTrajectory", "A trajectory that a search found.",
    "code url run run_name external_id group status",
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
        names = columns.get(row.index, [])
        return cls(row.index, row.n_tokens, row.n_trained, row.follows_steps, sorted(row.steps), names,
                   row.key is not None)


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
            cls, finding, trajectory=trajectory, number=number, title=finding_title(finding.kind),
            step=finding.step_index, row=finding.row_index, places=places_of(finding), muted=finding.kind in muted,
        )


@dataclass(frozen=True)
class WholeFinding(Page):
    """A finding with its tokens."""

    finding: FindingValues
    """The finding."""
    expected_ids: list[int]
    """Token ids that should stand there."""
    actual_ids: list[int]
    """Token ids that stand there."""
