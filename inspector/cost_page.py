"""`/runs/<code>/cost`: what the findings of a run cost, by kind, by step and along the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Count, F, IntegerField, Sum, Value
from django.db.models.functions import Cast, Floor
from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.access import reads_run
from inspector.api import page
from inspector.run_data import run_facts
from inspector.trajectory_data import kind_words
from rollouts.models import Finding, Run

SLICES = 20
"""Bars along the run."""
STEPS_SHOWN = 40


@dataclass(frozen=True)
class CostBar:
    """One bar in the units of its viewBox, and the list that it opens."""

    x: float
    y: float
    width: float
    height: float
    label: str
    trajectories: int
    of: int
    url: str

    @property
    def middle(self) -> float:
        return round(self.x + self.width / 2, 2)

    @property
    def has_room(self) -> bool:
        """Wide enough to be written on."""
        return self.width >= 48

    @property
    def share(self) -> float:
        return self.trajectories / self.of if self.of else 0.0

    @property
    def percent(self) -> str:
        return f"{100 * self.share:.1f} %"


WIDTH, TOP, BASE = 960, 18, 170
TICKS = 18
"""Room for the labels below the axis."""


@reads_run
def cost(request: HttpRequest, run: Run) -> HttpResponse:
    """Three aggregates over the findings, none over trajectories one by one."""
    kind = request.GET.get("finding", "").replace("\0", "")[:40]
    total = run.n_trajectories
    found = Finding.objects.filter(run=run)
    kinds = _kinds(run, found, total)
    chosen = found.filter(kind=kind) if kind else found
    steps, beyond = _by_step(chosen)
    slices = _along(chosen, total)
    most = max((n for _, _, n, of in slices if of), default=0)
    here = reverse("run", args=[run.code])
    also = f"&finding={kind}" if kind else ""
    data: dict[str, Any] = {
        "run": run_facts(run),
        "finding": kind,
        "kinds": kinds,
        "by_step": [{"step": step, "trajectories": n} for step, n in steps],
        "steps_beyond": beyond,
        "along": [{"first": a, "last": b, "trajectories": n, "of": of} for a, b, n, of in slices],
    }
    step_bars = _bars([(f"step {step}", n, total, f"{here}?at={step}{also}") for step, n in steps])
    slice_bars = _bars(
        [(f"trajectories {a:,} to {b:,}", n, of, f"{here}?from={a}&to={b}&flawed=1{also}") for a, b, n, of in slices]
    )
    charts = [
        {"id": "by-step", "title": "By step", "head": "Step", "bars": step_bars,
         "text": "Trajectories with a finding at each step."},
        {"id": "along", "title": "Along the run", "head": "Trajectories", "bars": slice_bars,
         "text": "Share of trajectories with a finding, in the order of the run."},
    ]  # fmt: skip
    return page(
        request, "runs/cost.html", data, charts=charts, most=most, chosen=kind_words(kind)[0] if kind else "",
        width=WIDTH, base=BASE, bottom=BASE + TICKS, beyond=beyond,
    )  # fmt: skip


def _kinds(run: Run, found: Any, total: int) -> list[dict[str, Any]]:
    rows = (
        found.values("kind")
        .annotate(
            findings=Count("pk"),
            trajectories=Count("trajectory", distinct=True),
            trained_tokens_lost=Sum("trained_tokens_lost"),
            trained_tokens_wrong=Sum("trained_tokens_wrong"),
            rows_more=Sum(F("rows") - Value(1)),
            prompt_tokens_repaid=Sum("prompt_tokens_repaid"),
        )
        .order_by("-trajectories", "kind")
    )
    here = reverse("run", args=[run.code])
    return [
        {
            **row,
            "title": kind_words(row["kind"])[0],
            "share": row["trajectories"] / total if total else 0.0,
            "percent": f"{100 * row['trajectories'] / total:.1f} %" if total else "",
            "rows_more": max(row["rows_more"], 0),
            "url": f"{here}?finding={row['kind']}",
        }
        for row in rows
    ]


def _by_step(found: Any) -> tuple[list[tuple[int, int]], int]:
    """Step -> trajectories with a finding there, and how many later steps are left out."""
    rows = list(
        found.filter(step_index__isnull=False)
        .values_list("step_index")
        .annotate(n=Count("trajectory", distinct=True))
        .order_by("step_index")
    )
    return rows[:STEPS_SHOWN], max(len(rows) - STEPS_SHOWN, 0)


def _along(found: Any, total: int) -> list[tuple[int, int, int, int]]:
    """(first, last, trajectories with a finding, trajectories) of equal stretches of the run."""
    if not total:
        return []
    size = max(-(-total // SLICES), 1)
    place = Cast(Floor(F("trajectory__index") / Value(float(size))), IntegerField())
    counts = dict(found.values_list(place).annotate(n=Count("trajectory", distinct=True)))
    starts = range(0, total, size)
    return [
        (start, min(start + size, total) - 1, counts.get(number, 0), min(size, total - start))
        for number, start in enumerate(starts)
    ]


def _bars(entries: list[tuple[str, int, int, str]]) -> list[CostBar]:
    slot = WIDTH / max(len(entries), 1)
    wide = min(slot - 3, 90)
    most = max((n / of for _, n, of, _ in entries if of), default=0) or 1
    bars = []
    for place, (label, n, of, url) in enumerate(entries):
        tall = max((BASE - TOP) * (n / of) / most, 2.0) if n and of else 0.0
        x = round(place * slot + (slot - wide) / 2, 2)
        bars.append(CostBar(x, round(BASE - tall, 2), round(wide, 2), round(tall, 2), label, n, of, url))
    return bars
