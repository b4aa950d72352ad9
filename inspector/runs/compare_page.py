"""`/runs/compare?run=CODE&run=CODE`: up to six runs side by side, and their training steps on the same axes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.runs.cached_figures import summary_of, totals_of
from inspector.runs.live_parts import mark_of, nothing_new
from inspector.runs.run_values import BOOKKEEPING, RunValues
from inspector.runs.training.overlay import Overlay, overlay, table
from inspector.runs.trajectory_values import QuestionSide, TrajectoryValues
from inspector.web.access import access, found_or_404
from inspector.web.twins import Page, is_fragment, page, whole_number
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.jobs.launch import setting_labels
from rollouts.store.chat_templates.chat_templates import chat_template_labels
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run, template_name
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.runs import find_run
from rollouts.store.runs.training_steps import training_steps_of
from rollouts.store.trajectories.groups import shared_questions

MAX_QUESTIONS = 20
MAX_RUNS = 6  # Runs of one comparison.
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True)
class ComparedRun:
    """A run of the comparison."""

    run: RunValues
    """The run as every page shows it."""
    trained: int
    """Tokens under the gradient."""
    lost: int | None
    """Tokens that were sampled and that no row trains as they were sampled; None = not known."""
    foreign: int | None
    """Tokens under the gradient that were not sampled as they stand; None = not known."""
    flawed: dict[str, int]
    """Kind of finding -> trajectories that have it."""
    severities: dict[str, str]
    """Kind of finding -> its worst severity in this run."""
    muted: list[str]
    """The kinds that are muted in this run; they count all the same."""
    template: str | None
    """The chat template of its prompts, as its project calls it; None = not known."""
    template_sha256: str | None
    """Its hash."""
    rows_template: str | None
    """The chat template of its rows, where it is another one."""
    rows_template_sha256: str | None
    """Its hash."""


@dataclass(frozen=True)
class KindOfRun:
    """How many trajectories of a run have findings of a kind."""

    trajectories: int
    """Those that have a finding of the kind."""
    severity: str
    """The worst severity of the kind in the run; empty where it has none."""
    muted: bool
    """It is muted in the run."""
    url: str
    """Address of these trajectories."""


@dataclass(frozen=True)
class KindInRuns:
    """A kind of finding in each of the runs."""

    kind: str
    """Slug of the kind."""
    title: str
    """The kind in words."""
    counts: list[KindOfRun]
    """In the order of the runs."""


@dataclass(frozen=True)
class QuestionInRuns:
    """A question that all runs answer."""

    external_id: str
    """What all runs call their trajectory."""
    prompt_line: str
    """The first line of the task; empty = not known."""
    sides: list[QuestionSide]
    """In the order of the runs."""


@dataclass(frozen=True)
class RunComparison(Page):
    """Runs side by side and on the same axes."""

    runs: list[ComparedRun]
    """The runs, in the order of the address; empty while fewer than two are named."""
    settings: list[tuple[str, list[Any]]]
    """What was asked for differently: its name, and the value of each run."""
    kinds: list[KindInRuns]
    """Kinds of findings of any of the runs, the gravest first."""
    questions: list[QuestionInRuns]
    """The first trajectories that all runs call alike, those with an error before the others."""
    live: bool = field(default=False)
    """A run still works."""
    overlay: Overlay | None = field(default=None)
    """The figures by training step; None = no run has a training step, or none of the chosen ones."""
    training_min: int | None = field(default=None)
    """Steps before it are left out of the charts; None = none are."""
    training_max: int | None = field(default=None)
    """Steps after it are left out of the charts; None = none are."""
    notices: list[str] = field(default_factory=list)
    """Sentences about what of the address was not followed."""


@require_safe
@never_cache
def compare(request: HttpRequest) -> HttpResponse:
    """The figures, findings and questions of up to six runs. While one works, the page asks for the tables again."""
    all_codes = [code[:64].replace("\0", "") for code in request.GET.getlist("run") if code]
    codes = all_codes[:MAX_RUNS]
    runs = [_visible(request, code) for code in codes]
    comparison = _compared(runs) if len(runs) > 1 else RunComparison([], [], [], [])
    mark = mark_of(comparison)
    if is_fragment(request, "compared"):
        if mark == request.GET.get("have"):
            return nothing_new()
        return page(request, "runs/_compared.html", comparison, asked=codes, mark=mark, most_questions=MAX_QUESTIONS)
    least, most = (whole_number(request.GET.get(name, "").strip()) for name in ("training_min", "training_max"))
    comparison = _over_training(comparison, runs, least, most)
    if len(all_codes) > MAX_RUNS:
        comparison.notices.append(f"The address names {len(all_codes):,} runs. The first {MAX_RUNS} are compared.")
    if len(runs) == 1:
        comparison.notices.append("One run is named. Name a second one to compare it with.")
    tables = (
        []
        if comparison.overlay is None
        else [(chart, table(comparison.overlay, chart)) for chart in comparison.overlay.charts]
    )
    return page(
        request, "runs/compare.html", comparison, asked=codes, mark=mark, boxes=_boxes(codes), tables=tables,
        is_narrowed=least is not None or most is not None, most_questions=MAX_QUESTIONS,
    )


def compared(runs: Sequence[Run], least: int | None = None, most: int | None = None) -> RunComparison:
    """Two or more runs side by side, and over the training steps from ``least`` to ``most``."""
    return _over_training(_compared(runs), runs, least, most)


def _over_training(shown: RunComparison, runs: Sequence[Run], least: int | None, most: int | None) -> RunComparison:
    """The comparison with the charts of these steps; one of fewer than two runs has none."""
    charts = None
    if shown.runs:
        steps = training_steps_of(runs, least, most)
        charts = overlay([run.name for run in runs], [steps[run.pk] for run in runs])
    return replace(shown, overlay=charts if charts and charts.steps else None, training_min=least, training_max=most)


def _boxes(asked: Sequence[str]) -> list[tuple[str, str]]:
    """Label and text of each field for the code of a run: two, and one more than is named."""
    n = min(max(2, len(asked) + 1), MAX_RUNS) if len(asked) > 1 else 2
    return [(label, asked[i] if i < len(asked) else "") for i, label in enumerate(ORDINALS[:n])]


def _visible(request: HttpRequest, code: str) -> Run:
    run = find_run(code=code)
    hidden = run is None or access(request).role_in(run.project_id) is None
    return found_or_404(None if hidden else run, "run", code)


def _compared(runs: Sequence[Run]) -> RunComparison:
    compared_runs = [_one(run) for run in runs]
    kinds = [
        KindInRuns(slug, kind.title, [_count(compared_run, slug) for compared_run in compared_runs])
        for slug, kind in KINDS.items()
        if any(slug in compared_run.flawed for compared_run in compared_runs)
    ]
    kinds.sort(key=lambda kind: (min(_gravity(count.severity) for count in kind.counts),
                                 -max(count.trajectories for count in kind.counts)))
    return RunComparison(compared_runs, _different(runs), kinds, _questions(runs), any(is_active(run) for run in runs))


def _count(one: ComparedRun, kind: str) -> KindOfRun:
    n, severity = one.flawed.get(kind, 0), one.severities.get(kind, "")
    return KindOfRun(n, severity, kind in one.muted, f"{one.run.url}?finding={kind}")


def _gravity(severity: str) -> int:
    """The place of a severity, the gravest first; empty comes last."""
    severities = list(Severity)
    return severities.index(Severity(severity)) if severity else len(severities)


def _one(run: Run) -> ComparedRun:
    totals, summary = totals_of(run), summary_of(run)
    worst = {kind: min(severities, key=_gravity) for kind, severities in summary.finding_severities.items()}
    return ComparedRun(
        RunValues.of(run), totals.trained, totals.lost, totals.foreign, summary.finding_trajectories, worst,
        sorted(kind for kind in muted_in(run) if kind in summary.finding_trajectories), *_templates(run),
    )


def _templates(run: Run) -> tuple[str | None, ...]:
    """Name and hash of the chat template of the prompts, and of that of the rows. One query, or none."""
    hashes = [run.chat_template_id or None, run.rows_chat_template_id or None]
    labels = chat_template_labels(run.project_id, [sha256 for sha256 in hashes if sha256]) if any(hashes) else {}
    return tuple(
        label
        for sha256 in hashes
        for label in (template_name(labels.get(sha256, ""), sha256) if sha256 else None, sha256)
    )


def _questions(runs: Sequence[Run]) -> list[QuestionInRuns]:
    return [
        QuestionInRuns(
            sides[0].external_id,
            next((side.prompt_line for side in sides if side.prompt_line), ""),
            [QuestionSide.of(TrajectoryValues.of(side, run)) for side, run in zip(sides, runs, strict=True)],
        )
        for sides in shared_questions(runs, MAX_QUESTIONS)
    ]


def _different(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """What was asked for differently, among the runs that record settings: an import records none."""
    labels = setting_labels()
    names = list(dict.fromkeys(name for run in runs for name in run.settings if name not in BOOKKEEPING))
    values_by_name = {name: [run.settings.get(name) for run in runs] for name in names}
    return [
        (labels.get(name, name.replace("_", " ").capitalize()), values)
        for name, values in values_by_name.items()
        if len({repr(run.settings.get(name)) for run in runs if set(run.settings).difference(BOOKKEEPING)}) > 1
    ]
