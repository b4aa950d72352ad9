"""`/runs/<code>/training`: a run by the step of its trainer, and since when it has each finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.html.inspector_tags import finding_title
from inspector.runs.pages import RunValues
from inspector.runs.training.gap_causes import GapCauseValues, gap_causes
from inspector.runs.training.training_charts import charts_of, numbers, spaced
from inspector.web.access import reader_of, reads_run
from inspector.web.twins import Page, page, wants_json, whole_number
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.training_axis import axis_sentences
from rollouts.store.models import Run
from rollouts.store.runs.figures import worst_severities
from rollouts.store.runs.gap import named_causes
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.policy_versions import PolicyVersionLine, has_versions, over_versions
from rollouts.store.runs.training_steps import (
    NOT_DECIDABLE,
    FiguresLine,
    TrainingStepLine,
    over_training,
    runs_beside,
    without_training_step,
)

MAX_ROWS = 50
"""Training steps that the table shows."""
MAX_OTHERS = 30
"""Other runs of the project that the page offers to draw on the same axes, the newest."""


@dataclass(frozen=True)
class TrainingPage(Page):
    """A run by training step, or by policy version."""

    run: RunValues
    """The run."""
    steps: list[TrainingStepLine]
    """The figures of each training step, in order."""
    began: dict[str, int]
    """Kind of a finding -> the first training step of the run that has it."""
    without: int
    """Trajectories that have no training step, or that are not counted yet."""
    training_min: int | None
    """Steps before it are left out; None = none are."""
    training_max: int | None
    """Steps after it are left out; None = none are."""
    muted: list[str]
    """The kinds that are muted in the run; they count all the same."""
    by: str = "step"
    """``step``, or ``version`` for the figures by policy version."""
    versions: list[PolicyVersionLine] = field(default_factory=list)
    """By version: the figures of each, in order; ``steps`` is empty then."""
    notices: list[str] = field(default_factory=list)
    """Sentences: steps that are missing, out of order or came again, and what of the address was not followed."""
    gap_causes: list[GapCauseValues] = field(default_factory=list)
    """The causes of its gap between trainer and sampler; empty where none is named or no worker has read it."""


@dataclass(frozen=True)
class Beginning:
    """Since when the run has findings of a kind."""

    kind: str
    title: str
    severity: str
    place: int
    """Where it begins: a training step, or the place of a version."""
    where: str
    """The same in words."""
    trajectories: int
    """Trajectories there with such a finding."""
    url: str
    """Address of these; empty = no list shows them alone."""


@reads_run
def training(request: HttpRequest, run: Run) -> HttpResponse:
    """A run by training step, or with ``by=version`` by policy version.

    Stored figures answer it, so that the number of queries does not depend on the size of the run.
    """
    here = reverse("run", args=[run.code])
    if request.GET.get("by") == "version":
        return _by_version(request, run, here)
    texts = [request.GET.get(name, "").strip() for name in ("training_min", "training_max")]
    least, most = (whole_number(text) for text in texts)
    notices = [
        f"“{text[:40]}” is no training step, so it was left out."
        for text, number in zip(texts, (least, most), strict=True)
        if text and number is None
    ]
    found = over_training(run, least, most)
    without = without_training_step(run)
    shown = TrainingPage(
        RunValues.of(run), found.steps, found.began, without, least, most, sorted(muted_in(run)),
        notices=notices + axis_sentences(found.steps),
        gap_causes=gap_causes(run, named_causes([run]).get(run.pk, [])),
    )
    return page(
        request, "runs/training.html", shown, **_drawn(found.steps, [f"{one.training_step:,}" for one in found.steps]),
        rows=_rows(found.steps, here), beginnings=_beginnings(shown, here, worst_severities(run)), list_url=here,
        is_narrowed=least is not None or most is not None, has_versions=has_versions(run),
        others=runs_beside(run, MAX_OTHERS) if found.steps and reader_of(request) and not wants_json(request) else [],
    )


def _by_version(request: HttpRequest, run: Run, here: str) -> HttpResponse:
    lines = over_versions(run)
    without = max(run.n_trajectories - sum(line.trajectories for line in lines), 0)
    shown = TrainingPage(
        RunValues.of(run), [], {}, without, None, None, sorted(muted_in(run)), by="version", versions=lines,
        gap_causes=gap_causes(run, named_causes([run]).get(run.pk, [])),
    )
    rows = [(line, line.version, _address_of(line, here)) for line in lines[-MAX_ROWS:]]
    worst = worst_severities(run)
    first: dict[str, int] = {}
    for place, line in enumerate(lines):
        for kind in (kind for kind, n in line.findings.items() if n and kind != NOT_DECIDABLE):
            first.setdefault(kind, place)
    beginnings = [
        _beginning(
            kind, place, f"policy version {lines[place].version}", lines[place].findings[kind],
            _address_of(lines[place], here, finding=kind), worst,
        )
        for kind, place in first.items()
    ]
    return page(
        request, "runs/training.html", shown, **_drawn(lines, [line.version for line in lines]), rows=rows,
        beginnings=sorted(beginnings, key=_gravest_first), list_url=here, has_versions=True,
    )


def _drawn(lines: Sequence[FiguresLine], labels: Sequence[str]) -> dict[str, Any]:
    """The charts with the tables beside them, and how many steps the tables leave out."""
    return {
        "charts": [(chart, numbers(chart, lines, labels)) for chart in charts_of(lines)], "n_lines": len(lines),
        "left_out": max(len(lines) - MAX_ROWS, 0), "n_spaced": len(spaced(len(lines))),
    }


def _address_of(line: PolicyVersionLine, here: str, **also: str) -> str:
    """Address of the trajectories of a version. Their places in the run keep a large list short."""
    places = {} if line.first is None else {"from": line.first, "to": line.last}
    return f"{here}?{urlencode({**also, 'policy': line.version, **places})}"


def _rows(steps: list[TrainingStepLine], here: str) -> list[tuple[TrainingStepLine, int, str]]:
    """The last steps, with their numbers and the addresses of their trajectories."""
    return [
        (one, one.training_step, f"{here}?training_min={one.training_step}&training_max={one.training_step}")
        for one in steps[-MAX_ROWS:]
    ]


def _beginnings(shown: TrainingPage, here: str, worst: Mapping[str, str]) -> list[Beginning]:
    of_step = {line.training_step: line for line in shown.steps}
    found = []
    for kind, step in shown.began.items():
        if kind == NOT_DECIDABLE:
            continue
        n = of_step[step].findings[kind] if step in of_step else 0
        url = f"{here}?finding={kind}&training_min={step}&training_max={step}"
        found.append(_beginning(kind, step, f"training step {step:,}", n, url, worst))
    return sorted(found, key=_gravest_first)


def _beginning(kind: str, place: int, where: str, n: int, url: str, worst: Mapping[str, str]) -> Beginning:
    severity = worst.get(kind) or (str(KINDS[kind].severity) if kind in KINDS else "")
    return Beginning(kind, finding_title(kind), severity, place, where, n, url)


def _gravest_first(one: Beginning) -> tuple[int, int, str]:
    return {"error": 0, "warning": 1}.get(one.severity, 2), one.place, one.kind
