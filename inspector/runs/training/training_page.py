"""`/runs/<code>/training`: a run by the step of its trainer, and since when it has each finding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.html.inspector_tags import finding_title
from inspector.runs.run_values import OfRun, RunValues
from inspector.runs.training.gap_causes import GapCauseValues, gap_causes
from inspector.runs.training.training_charts import changes_of, charts_of, numbers, spaced
from inspector.web.access import reader_of, reads_run
from inspector.web.twins import page, wants_json, whole_number
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.training_axis import axis_sentences
from rollouts.store.models import Run
from rollouts.store.runs.figures import worst_severities
from rollouts.store.runs.logprob_columns import named_causes
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.policy_versions import PolicyVersionLine, has_versions, over_versions
from rollouts.store.runs.training_steps import (
    NOT_DECIDABLE, FiguresLine, TrainingStepLine, over_training, runs_beside, without_training_step
)

MAX_ROWS = 50  # Training steps that the table shows.
MAX_OTHERS = 30  # Other runs of the project that the page offers to draw on the same axes, the newest.


@dataclass(frozen=True)
class TrainingPage(OfRun):
    """A run by training step, or by policy version."""

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
    changes: list[str] = field(default_factory=list)
    """A sentence for each figure that is another before a step than from it on; of fewer than 8 steps there is none."""


@reads_run
def training(request: HttpRequest, run: Run) -> HttpResponse:
    """A run by training step, or with ``by=version`` by policy version. Stored figures answer it, so that the number of
    queries does not depend on the size of the run."""
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
    data = training_of(run, False, least, most, notices)
    rows = [
        (step, step.training_step, f"{here}?training_min={step.training_step}&training_max={step.training_step}")
        for step in data.steps[-MAX_ROWS:]
    ]
    return page(
        request, "runs/training.html", data,
        **_drawn(data.steps, [f"{step.training_step:,}" for step in data.steps]), rows=rows,
        beginnings=_beginnings(data, here, worst_severities(run)), list_url=here,
        is_narrowed=least is not None or most is not None, has_versions=has_versions(run),
        others=runs_beside(run, MAX_OTHERS) if data.steps and reader_of(request) and not wants_json(request) else [],
    )


def training_of(
    run: Run, by_version: bool = False, least: int | None = None, most: int | None = None, notices: Sequence[str] = ()
) -> TrainingPage:
    """A run by training step, or by policy version. The number of queries does not depend on its size."""
    steps, first_steps = ([], {}) if by_version else over_training(run, least, most)
    versions = over_versions(run) if by_version else []
    lines: Sequence[FiguresLine] = versions or steps
    places = [f"policy version {line.version}" for line in versions]
    without = max(run.n_trajectories - sum(line.trajectories for line in versions), 0)
    return TrainingPage(
        RunValues.of(run), steps, first_steps, without if by_version else without_training_step(run),
        *((None, None) if by_version else (least, most)), sorted(muted_in(run)),
        by="version" if by_version else "step", versions=versions,
        notices=[*notices, *axis_sentences(steps)],
        gap_causes=gap_causes(run, named_causes([run]).get(run.pk, [])),
        changes=changes_of(lines, places or [f"training step {step.training_step:,}" for step in steps]),
    )


def _by_version(request: HttpRequest, run: Run, here: str) -> HttpResponse:
    data = training_of(run, by_version=True)
    lines = data.versions
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
        request, "runs/training.html", data, **_drawn(lines, [line.version for line in lines]), rows=rows,
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


def _beginnings(shown: TrainingPage, here: str, worst: Mapping[str, str]) -> list[dict[str, Any]]:
    of_step = {line.training_step: line for line in shown.steps}
    beginnings = []
    for kind, step in shown.began.items():
        if kind == NOT_DECIDABLE:
            continue
        n = of_step[step].findings[kind] if step in of_step else 0
        url = f"{here}?finding={kind}&training_min={step}&training_max={step}"
        beginnings.append(_beginning(kind, step, f"training step {step:,}", n, url, worst))
    return sorted(beginnings, key=_gravest_first)


def _beginning(kind: str, place: int, where: str, n: int, url: str, worst: Mapping[str, str]) -> dict[str, Any]:
    """Since when the run has findings of a kind: ``place`` is a training step, or the place of a version."""
    severity = worst.get(kind) or (str(KINDS[kind].severity) if kind in KINDS else "")
    place_words = {"place": place, "where": where, "trajectories": n, "url": url}
    return {"kind": kind, "title": finding_title(kind), "severity": severity, **place_words}


def _gravest_first(beginning: Mapping[str, Any]) -> tuple[int, int, str]:
    return {"error": 0, "warning": 1}.get(beginning["severity"], 2), beginning["place"], beginning["kind"]
