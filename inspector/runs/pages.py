"""What the pages of runs show, as typed values. Each page is the JSON of its twin too."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.urls import reverse

from inspector.runs.jobs import JobLine
from inspector.runs.launches.template_refusal import TemplateRefusal
from inspector.runs.muted import MutedValues
from inspector.runs.strategies import RunStrategies
from inspector.runs.training.alarm_values import AlarmValues
from inspector.runs.training.gap_causes import GapCauseValues
from inspector.runs.values import BOOKKEEPING, Progress
from inspector.web.twins import Page, from_columns
from rollout_inspector.formats import lacks_of
from rollouts.sampling.engines import engine_spec
from rollouts.store.models import Run
from rollouts.store.runs.figures import KindCost
from rollouts.store.runs.run_summary import RunSummary
from rollouts.store.runs.runs import RunTotals


def per_call(n_rows: int, n_steps: int) -> float | None:
    """Training rows for each engine call, two decimals; None without steps. At best all calls make one row."""
    return round(n_rows / n_steps, 2) if n_steps else None


@dataclass(frozen=True)
class RunValues(Page):
    """A run as every page shows it: columns alone, no query."""

    code: str
    """Names the run in addresses."""
    name: str
    """What its maker called it."""
    kind: str
    """One of ``Run.Kind``."""
    status: str
    """One of ``Run.Status``."""
    error: str
    """Why it failed; empty otherwise."""
    cancel_requested: bool
    """Somebody asked it to stop."""
    url: str
    """Address of its page."""
    created_at: datetime
    """When it was asked for."""
    started_at: datetime | None
    """When a worker began it."""
    finished_at: datetime | None
    """When it ended."""
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
    steps: int
    """Engine calls that are stored."""
    rows: int
    """Training rows."""
    rows_per_call: float | None
    """Training rows for each engine call, two decimals; null without steps."""
    tokens: int
    """New tokens: deltas and completions."""
    sampled: int
    """Tokens that the model sampled."""
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
        reward_mean = run.reward_sum / run.n_rewards if run.n_rewards else None
        url = reverse("run", args=[run.code])
        rows_per_call = per_call(run.n_rows, run.n_steps)
        return from_columns(
            cls, run, url=url, reward_mean=reward_mean, rows_per_call=rows_per_call, findings=findings, **more
        )


@dataclass(frozen=True)
class ListedRun(RunValues):
    """A run as a line of the list of runs."""

    worst: tuple[str, int] | None
    """The gravest severity of its findings, and how many trajectories have it."""
    severities: dict[str, int]
    """Worst severity -> trajectories, the gravest first; empty where they are not counted."""
    top_cause: str | None
    """The most frequent kind among those of the gravest usual severity that are not muted."""
    muted: list[str]
    """Its kinds of findings that the project has muted in it; they count everywhere."""
    alarms: int
    """Limits of its training steps that it is above."""
    gap_causes: list[GapCauseValues]
    """The causes of its gap between trainer and sampler; empty where none is named or no worker has read it."""
    tags: list[str]
    """By name."""
    project: str | None
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

    @classmethod
    def of(cls, run: Run, /, **more: Any) -> Self:
        """Tokenizer and owner are read one by one: at most two queries."""
        return super().of(
            run,
            tokenizer=run.tokenizer.name if run.tokenizer else None,
            chat_template=run.chat_template_id,
            rows_chat_template=run.rows_chat_template_id,
            seed_note=engine_spec(run.engine).seed_note if run.kind == Run.Kind.LAUNCH else "",
            tool_calls_note=run.settings.get("tool_calls_note", ""),
            created_by=run.created_by.get_username() if run.makers_shown and run.created_by else None,
            lacks=lacks_of(run.format),
            settings={key: value for key, value in run.settings.items() if key not in BOOKKEEPING},
            **more,
        )


@dataclass(frozen=True)
class RunsPage(Page):
    """The list of runs."""

    runs: list[ListedRun]
    """One part of the list, newest first."""
    next: str | None
    """What ``after`` takes for the following part; None on the last."""
    totals: RunTotals
    """Over all runs that pass the filter."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


@dataclass(frozen=True)
class TrajectoryLine:
    """A trajectory as a line of its run's list."""

    code: str
    """Names it in addresses."""
    url: str
    """Address of its page; keeps the list's filter for its siblings."""
    index: int
    """Its position in the run, from 0."""
    external_id: str
    """What the files or the environment call it."""
    group: str
    """The trajectories of one prompt have the same; empty = not known."""
    group_url: str
    """Address of its group; empty = it has none."""
    status: str
    """`queued`, `running`, `done`, `failed` or `cancelled`."""
    error: str
    """Why it failed; empty = it did not."""
    stop_reason: str
    """Why it ended; empty = not known."""
    prompt_line: str | None
    """First line of the task: of the last user message of its first request; null = not known."""
    answer_line: str | None
    """First line of its last answer, without reasoning; null = not known."""
    reward: float | None
    """Null = it has none."""
    reward_parts: dict[str, float]
    """Name of a part of the reward -> its value."""
    training_step: int | None
    """Of the trainer; null = not recorded."""
    steps: int
    """Engine calls."""
    rows: int
    """Training rows."""
    rows_per_call: float | None
    """Rows for each engine call, two decimals: at best one row of all; null without steps."""
    tokens: int
    """Tokens that are stored: what each step adds."""
    sampled: int
    """Tokens that the engine sampled."""
    trained: int
    """Tokens under the loss mask."""
    findings: int
    """Findings of every severity."""
    worst_severity: str
    """Of its findings; empty = it has none."""
    kinds: dict[str, str]
    """Kind of its findings -> the worst severity of that kind."""
    not_checked: int | None
    """Checks of the diagnosis that could not decide; None = not known."""
    comments: int | None
    """Comments on it; null for the visitor of a share link."""
    open_comments: int | None
    """Comments that nobody has resolved."""
    seen: bool | None
    """Whether the reader has marked it as seen; null for the visitor of a share link."""
    zero_variance: bool
    """All rewards of its group are equal, and none is still to come."""


@dataclass(frozen=True)
class RejectedLine:
    """A line of an imported file that could not be read."""

    file: str
    line: int | None
    """None = the whole file."""
    reason: str


@dataclass(frozen=True)
class RunPage(Page):
    """One run: progress, figures, what can be done to it, and one part of its trajectories."""

    run: ShownRun
    """The run and its origin."""
    progress: Progress
    """Done of total, rate, remaining seconds, and the sentence that says why nothing moves."""
    refusal: TemplateRefusal | None
    """Of a launch whose chat template was refused: the finding, and its repair."""
    summary: RunSummary
    """Counts, rewards, findings by kind."""
    rejections: list[RejectedLine]
    """The first lines that could not be read."""
    tokenizer_note: str
    """That ids cannot be read as text; empty while all is well."""
    tags: list[str]
    """By name."""
    jobs: list[JobLine]
    """Work that was asked for on the run, the newest first."""
    jobs_live: bool
    """One of these jobs still changes."""
    filter: dict[str, str]
    """The parameters that say which trajectories are listed, and ``sort``."""
    queued: int
    """Trajectories that nobody has begun; while a launch works the list leaves them out."""
    muted: list[MutedValues]
    """The rules that mute kinds of findings in this run; what they mute counts in every figure."""
    alarms: list[AlarmValues]
    """The limits of its training steps that the run is above, and those that it was above."""
    gap_causes: list[GapCauseValues]
    """The causes of its gap between trainer and sampler; empty where none is named or no worker has read it."""
    trajectories: list[TrajectoryLine]
    """One part of the list."""
    next: str | None
    """What ``after`` takes for the following part; None on the last."""
    total: int | None
    """How many trajectories pass the filter; None = more than are counted."""
    first: int | None
    """Place of the first line among them, from 1; None = further on than is counted."""
    notices: tuple[str, ...]
    """Sentences about parameters that were left out because they made no sense."""


@dataclass(frozen=True)
class KindLine(KindCost):
    """The cost of one kind of finding, with shares."""

    title: str
    """The kind in words."""
    share: float
    """Of the run's trajectories, 0 to 1."""
    percent: str
    """The share in words; empty for a run without trajectories."""
    lost_percent: str
    """Lost tokens as a share of the sampled ones, in words."""
    wrong_percent: str
    """Wrong tokens as a share of the sampled ones, in words."""
    url: str
    """The trajectories that have this kind."""
    muted: bool
    """The project knows it in this run."""


@dataclass(frozen=True)
class CostPage(Page):
    """What the findings of a run cost."""

    run: RunValues
    """The run."""
    finding: str
    """The kind that the charts show; empty = all kinds."""
    totals: dict[str, int | None]
    """Over trajectories with steps: tokens ``sampled``, ``trained``, ``lost`` and ``foreign``. None = not known."""
    kinds: list[KindLine]
    """The cost by kind, the one that costs most tokens first."""
    by_step: list[dict[str, int]]
    """Trajectories with a finding at each of the first steps."""
    steps_beyond: int
    """Later steps with findings, which are left out."""
    along: list[dict[str, int]]
    """Trajectories with a finding in each of equal stretches of the run."""
    strategies: RunStrategies
    """What every other strategy would have made of the run."""


@dataclass(frozen=True)
class ImportPage(Page):
    """The upload form."""

    project: str
    """Code of the project that takes the run, unless the form names another one."""
    upload_max_bytes: int
    """The most bytes of one request."""
    tokenizers: list[str]
    """Names of the tokenizers of that project."""
    errors: dict[str, list[str]]
    """Field -> what is wrong with it; empty before a POST."""


@dataclass(frozen=True)
class LaunchPage(Page):
    """The launch form."""

    project: str
    """Code of the project that takes the run, unless the form names another one."""
    fields: dict[str, dict[str, Any]]
    """Each field with its default, its help and its choices, so that a script can fill the form in."""
    notices: list[str]
    """Where the form's values come from, and what in the address leads nowhere."""
    errors: dict[str, list[str]]
    """Field -> what is wrong with it; empty before a POST."""
