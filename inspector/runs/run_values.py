"""A run as pages and the API show it."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from django.urls import reverse

from inspector.runs.training.gap_causes import GapCauseValues
from inspector.web.twins import Page, from_columns
from rollout_inspector.formats import lacks_of
from rollout_inspector.streams import figures
from rollout_inspector.streams.trajectory import FORKED
from rollouts.sampling.engines import engine_spec
from rollouts.store.models import Run
from rollouts.store.runs.gallery import KEY, TRAINING_KEY
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO

BOOKKEEPING = (
    "files", "opened", "format", "use_recorded_tokenizer", "imported", "tool_calls_note", KEY, TRAINING_KEY,
    DIAGNOSED_TO, FORKED,
)
"""Settings that only the program needs."""


@dataclass(frozen=True)
class WorkValues(Page):
    """Work with a beginning and an end: a run, a trajectory or a job."""

    code: str
    """Names it in addresses."""
    status: str
    """``queued``, ``running``, ``done``, ``failed`` or ``cancelled``."""
    error: str
    """Why it failed; empty = it did not."""
    created_at: datetime
    """When it was asked for; of a trajectory when it was stored."""
    finished_at: datetime | None
    """When it ended."""


@dataclass(frozen=True)
class CountedValues(WorkValues):
    """A run or a trajectory with its page and its sizes."""

    url: str
    """Address of its page; of a trajectory in the list of a page it keeps the filter for its siblings."""
    steps: int
    """Engine calls."""
    rows: int
    """Training rows."""
    rows_per_call: float | None
    """Rows for each engine call, two decimals: at best one row of all calls; null without steps."""
    tokens: int
    """Tokens that are stored: what each step adds."""
    sampled: int
    """Tokens that the model sampled."""


@dataclass(frozen=True)
class RunValues(CountedValues):
    """A run as every page shows it: columns alone, no query."""

    name: str
    """What its maker called it."""
    kind: str
    """One of ``Run.Kind``."""
    cancel_requested: bool
    """Somebody asked it to stop."""
    started_at: datetime | None
    """When a worker began it."""
    model: str
    """Of a launch: the model that was sampled."""
    engine: str
    """Of a launch: what sampled it."""
    environment: str
    """Of a launch: what made the tasks."""
    strategy: str
    """Of a launch: how observations became the next prompt."""
    format: str
    """Of an import: the formats that were recognised."""
    expected: int
    """Trajectories that a launch will make."""
    trajectories: int
    """Trajectories that are stored, those under way included."""
    finished: int
    """Trajectories that are done."""
    failed: int
    """Trajectories that failed."""
    rejected: int
    """Lines of files that could not be read."""
    reward_mean: float | None
    """Of the trajectories that have a reward; None when none has."""
    diagnosis_version: int | None
    """The oldest version of the diagnosis among its trajectories; None when none was diagnosed."""
    findings: dict[str, int]
    """Kind -> findings, by kind, without zeros."""

    @classmethod
    def of(cls, run: Run, /, **more: Any) -> Self:
        """The values of a run, and those that a subclass adds."""
        findings = {kind: count for kind, count in sorted(run.finding_counts.items()) if count}
        url = reverse("run", args=[run.code])
        return from_columns(
            cls, run, url=url, reward_mean=figures.reward_mean(run.reward_sum, run.n_rewards),
            rows_per_call=figures.rows_per_call(run.n_rows, run.n_steps), findings=findings, **more
        )


@dataclass(frozen=True)
class OfRun(Page):
    """What a page shows of one run."""

    run: RunValues
    """The run."""


@dataclass(frozen=True)
class ListedRun(RunValues):
    """A run as a line of the list of runs."""

    project_code: str
    """Code of its project."""
    worst: tuple[str, int] | None = None
    """The gravest severity of its findings, and how many trajectories have it."""
    severities: dict[str, int] = field(default_factory=dict)
    """Worst severity -> trajectories, the gravest first; empty where they are not counted."""
    top_cause: str | None = None
    """The most frequent kind among those of the gravest usual severity that are not muted."""
    muted: list[str] = field(default_factory=list)
    """Its kinds of findings that the project has muted in it; they count everywhere."""
    alarms: int = 0
    """Limits of its training steps that it is above."""
    gap_causes: list[GapCauseValues] = field(default_factory=list)
    """The causes of its gap between trainer and sampler; empty where none is named or no worker has read it."""
    tags: list[str] = field(default_factory=list)
    """By name."""
    project: str | None = None
    """Name of its project, for a user who sees several."""


@dataclass(frozen=True)
class ShownRun(RunValues):
    """A run on its own page, with its origin."""

    project: str | None
    """Name of its project, for a user who sees several."""
    tokenizer: str | None
    """Name of its tokenizer."""
    chat_template: str | None
    """Hash of the chat template that made its prompts."""
    rows_chat_template: str | None
    """Hash of the chat template that made its rows; None = the same."""
    seed_note: str
    """Of a launch: what a seed is worth on its engine."""
    tool_calls_note: str
    """How its tool calls were read, where that is worth a sentence."""
    created_by: str | None
    """Who asked for it; None also for the visitor of a share link."""
    lacks: list[str]
    """Sentences about what its source did not bring."""
    settings: dict[str, Any]
    """What was asked for: prompts, group, sampling, seed, limits."""
    project_code: str = ""
    """Code of its project; empty on a page, which has not loaded it."""

    @classmethod
    def of(cls, run: Run, /, **more: Any) -> Self:
        """Tokenizer and owner are read one by one: at most two queries."""
        return super().of(
            run, tokenizer=run.tokenizer.name if run.tokenizer else None, chat_template=run.chat_template_id,
            rows_chat_template=run.rows_chat_template_id,
            seed_note=engine_spec(run.engine).seed_note if run.kind == Run.Kind.LAUNCH else "",
            tool_calls_note=run.settings.get("tool_calls_note", ""),
            created_by=run.created_by.get_username() if run.makers_shown and run.created_by else None,
            lacks=lacks_of(run.format),
            settings={key: value for key, value in run.settings.items() if key not in BOOKKEEPING}, **more,
        )
