"""What the API returns of runs, jobs and trajectories: steps, rows, tokens. The schema takes these docstrings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from django.urls import reverse

from inspector.runs.jobs.job_values import JobValues
from inspector.runs.run_values import ListedRun, RunValues, ShownRun
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.trajectories.tokens.findings import FindingValues
from inspector.web.twins import Page, some_fields
from rollout_inspector.refusal import Remedy, Words
from rollouts.jobs.exports.exports import is_offered
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

WORDS: Words = {
    Remedy.LEAVE_OUT: "Leave such trajectories out with `leave_out`, or write them all the same with `force`.",
    Remedy.OTHER_STRATEGY: "Name another `strategy`, or leave such trajectories out with `leave_out`.",
    Remedy.CHOOSE_TOKENIZER: "POST /api/v1/runs/CODE/diagnose with a `tokenizer` gives it one.",
    Remedy.REPLAY_BY_COMMAND: "On a command line there is no limit: manage.py replay, with the code of the trajectory.",
    Remedy.OWN_FORMAT: "Ask for the `format` own_jsonl, which holds all of them.",
    Remedy.ADOPT_FILES: "If that database is no longer used, run `manage.py doctor --adopt-files` on the server.",
}


COLUMNS = " ".join(field.name for field in fields(RunValues))
RunOfProject: Any = some_fields(
    ListedRun, "RunOfProject", "A run as a line of a list.", f"{COLUMNS} project=project_code"
)
WholeRun: Any = some_fields(
    ShownRun, "WholeRun", "A run with its origin.",
    f"{COLUMNS} project=project_code tokenizer chat_template rows_chat_template seed_note tool_calls_note created_by "
    "lacks settings",
)
JobAnswer: Any = some_fields(
    JobValues, "JobValues", "Background work.",
    "code kind what status active run trajectory check done total error sentence notes file bytes created_at "
    "finished_at expires_at",
)


def run_line(run: Run) -> Any:
    """A run whose project is loaded."""
    return RunOfProject.of(ListedRun.of(run, project_code=run.project.code))


def whole_run(run: Run) -> Any:
    """A run whose project, tokenizer and templates are loaded."""
    return WholeRun.of(ShownRun.of(run, project=None, project_code=run.project.code))


def job_answer(job: Job) -> Any:
    """A job whose subject is loaded."""
    return JobAnswer.of(JobValues.with_subject(
        job, WORDS, run=job.run.code if job.run else None,
        trajectory=job.subject.code if isinstance(job.subject, StoredTrajectory) else None,
        check=job.template_check.code if job.template_check else None,
        file=reverse("api:job_file", kwargs={"code": job.code}) if is_offered(job) else None,
    ))


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
