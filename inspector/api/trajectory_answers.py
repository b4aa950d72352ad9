"""What the API returns of trajectories: steps, rows, tokens, findings. The schema takes these docstrings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inspector.runs.trajectory_values import TrajectoryValues
from inspector.trajectories.tokens.findings import FindingValues
from inspector.web.twins import Page, some_fields
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

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
StepValues: Any = some_fields(
    StepSummary, "StepValues", "An engine call, without its tokens.",
    "index row parent shared_length parent_length breaks prompt_length completion_length finish_reason stop_reason "
    "logprobs_mode temperature top_p top_k engine policy_version",
)


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
class WholeFinding(Page):
    """A finding with its tokens."""

    finding: FindingValues
    """The finding."""
    expected_ids: list[int]
    """Token ids that should stand there."""
    actual_ids: list[int]
    """Token ids that stand there."""
