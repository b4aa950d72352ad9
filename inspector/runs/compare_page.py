"""`/runs/compare?run=CODE&run=CODE`: two runs side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.runs.cached_figures import summary_of, totals_of
from inspector.runs.launch_form import form_labels
from inspector.runs.live_parts import mark_of, nothing_new
from inspector.runs.pages import RunValues
from inspector.runs.values import BOOKKEEPING
from inspector.web.access import access, found_or_404
from inspector.web.twins import Page, from_columns, is_fragment, page
from rollouts.models import Run, StoredTrajectory
from rollouts.selectors.activity import is_active
from rollouts.selectors.muted import muted_in
from rollouts.selectors.runs import find_run, shared_questions
from rollouts.tito.diagnose.finding import Severity
from rollouts.tito.diagnose.kinds import KINDS

MAX_QUESTIONS = 20


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


@dataclass(frozen=True)
class KindInBoth:
    """A kind of finding and how many trajectories of each run have it."""

    kind: str
    """Slug of the kind."""
    title: str
    a: int
    a_severity: str
    """The worst severity of the kind in the first run; empty where it has none."""
    b: int
    b_severity: str
    """The worst severity of the kind in the second run; empty where it has none."""
    a_muted: bool
    """It is muted in the first run."""
    b_muted: bool
    """It is muted in the second run."""


@dataclass(frozen=True)
class QuestionSide:
    """What one run made of a question."""

    url: str
    """Address of the trajectory."""
    reward: float | None
    rows: int
    findings: int
    worst_severity: str


@dataclass(frozen=True)
class QuestionInBoth:
    """A question that both runs answer."""

    external_id: str
    a: QuestionSide
    b: QuestionSide


@dataclass(frozen=True)
class RunComparison(Page):
    """Two runs side by side."""

    a: ComparedRun | None
    """The first run; None while none is named."""
    b: ComparedRun | None
    """The second run; None while none is named."""
    settings: list[tuple[str, Any, Any]]
    """Name, value of the first run, value of the second: what was asked for differently."""
    kinds: list[KindInBoth]
    """Kinds of findings in either run, the gravest first."""
    questions: list[QuestionInBoth]
    """The first trajectories that both runs call alike, those with a finding before the others."""
    live: bool = field(default=False)
    """A run still works."""


@require_safe
@never_cache
def compare(request: HttpRequest) -> HttpResponse:
    """The figures, findings and questions of two runs. While one works, the page asks for them again."""
    asked = [code[:64].replace("\0", "") for code in request.GET.getlist("run") if code][:2]
    runs = [_visible(request, code) for code in asked]
    shown = RunComparison(None, None, [], [], [])
    if len(runs) == 2:
        shown = _compared(*runs)
    mark = mark_of(shown)
    polled = is_fragment(request, "compared")
    if polled and mark == request.GET.get("have"):
        return nothing_new()
    return page(request, "runs/_compared.html" if polled else "runs/compare.html", shown, asked=asked, mark=mark)


def _visible(request: HttpRequest, code: str) -> Run:
    run = find_run(code=code)
    hidden = run is None or access(request).role_in(run.project_id) is None
    return found_or_404(None if hidden else run, "run", code)


def _compared(a: Run, b: Run) -> RunComparison:
    one, other = _one(a), _one(b)
    kinds = [
        KindInBoth(
            slug, kind.title, one.flawed.get(slug, 0), one.severities.get(slug, ""), other.flawed.get(slug, 0),
            other.severities.get(slug, ""), slug in one.muted, slug in other.muted,
        )
        for slug, kind in KINDS.items()
        if slug in one.flawed or slug in other.flawed
    ]  # fmt: skip
    kinds.sort(key=lambda kind: (min(_gravity(kind.a_severity), _gravity(kind.b_severity)), -max(kind.a, kind.b)))
    return RunComparison(one, other, _different(a, b), kinds, _questions(a, b), is_active(a) or is_active(b))


def _gravity(severity: str) -> int:
    """The place of a severity, the gravest first; empty comes last."""
    held = list(Severity)
    return held.index(Severity(severity)) if severity else len(held)


def _one(run: Run) -> ComparedRun:
    totals, summary = totals_of(run), summary_of(run)
    worst = {kind: min(held, key=_gravity) for kind, held in summary.finding_severities.items()}
    return ComparedRun(
        RunValues.of(run),
        totals.trained,
        totals.lost,
        totals.foreign,
        summary.finding_trajectories,
        worst,
        sorted(kind for kind in muted_in(run) if kind in summary.finding_trajectories),
    )


def _questions(a: Run, b: Run) -> list[QuestionInBoth]:
    return [
        QuestionInBoth(one.external_id, _side(one.a), _side(one.b)) for one in shared_questions(a, b, MAX_QUESTIONS)
    ]


def _side(one: StoredTrajectory) -> QuestionSide:
    return from_columns(QuestionSide, one, url=reverse("trajectory", args=[one.code]))


def _different(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """What was asked for differently."""
    labels = form_labels()
    names = [name for name in {**a.settings, **b.settings} if name not in BOOKKEEPING]
    return [
        (labels.get(name, name.replace("_", " ").capitalize()), a.settings.get(name), b.settings.get(name))
        for name in names
        if a.settings.get(name) != b.settings.get(name)
    ]
