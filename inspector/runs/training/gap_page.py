"""`/runs/<code>/gap`: how far trainer and sampler are apart on a run, why, and what each loss makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.html.text import visible_text
from inspector.runs.ask_for_job import STILL_WORKS, ask_for_job
from inspector.runs.jobs import JobLine
from inspector.runs.loss_weights import section_of, weights_of
from inspector.runs.pages import RunValues
from inspector.web.access import may_write, reads_run, writes_run
from inspector.web.twins import Page, fields_of, page
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollouts.jobs.gap_reports import KIND, gap_key, why_no_columns, why_no_gap
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.jobs import latest_jobs
from rollouts.store.models import Job, Run


@dataclass(frozen=True)
class GapPage(Page):
    """The gap of a run between trainer and sampler."""

    run: RunValues
    """The run."""
    job: JobLine | None
    """The newest job that read the gap."""
    live: bool
    """That job still changes."""
    why_not: str
    """Why there is no gap to read; empty when there is one."""
    stale: bool
    """The run has changed since the report was made."""
    made_at: datetime | None
    """When the report was made."""
    report: dict[str, Any] | None
    """Figures, causes, undecided causes, worst tokens and tables; None until a job has ended."""


def gap_of(run: Run) -> GapPage:
    """The stored report of a run, or why there is none. At most two queries."""
    asked = latest_jobs(run, KIND.slug)
    latest = asked[0] if asked else None
    done = next((job for job in asked if job.status == Job.Status.DONE), None)
    report = dict(done.report) if done is not None and done.report else None
    key = report.pop("key") if report else ""
    return GapPage(
        run=RunValues.of(run),
        job=JobLine.of(latest, run) if latest is not None else None,
        live=latest is not None and is_active(latest),
        why_not=why_no_gap(run) if report is None else "",
        stale=report is not None and key != gap_key(run),
        made_at=done.finished_at if done is not None else None,
        report=report,
    )


@reads_run
def gap(request: HttpRequest, run: Run) -> HttpResponse:
    """The page of the stored report and of the weights in the loss. At most four queries beside the run's own."""
    shown, weights = gap_of(run), weights_of(run, request.GET)
    report = shown.report
    html: dict[str, Any] = {
        "writer": may_write(request),
        "section": section_of(weights, run),
        "can_ask": may_write(request) and not shown.live and not shown.why_not,
    }
    if report is not None:
        here = reverse("run", args=[run.code])
        html |= {
            "causes": [_cause(one, here) for one in report["causes"]],
            "undecided": [(CAUSES[name].title, sentence) for name, sentence in report["undecided"].items()],
            "tables": [(name.capitalize(), [_line(one) for one in lines]) for name, lines in report["parts"].items()],
            "tokens": [_token(one) for one in report["worst"]],
            "compared": report["compared"] if report["compared"][1] else None,
            "has_text": any("text" in one for one in report["worst"]),
            "ids": [{**_line(one), "shown": visible_text(one.get("text", ""))} for one in report["ids"]],
        }
    return page(request, "runs/gap.html", {**fields_of(shown), "weights": weights}, **html)


def _cause(one: Mapping[str, Any], here: str) -> dict[str, Any]:
    """A named cause with its words and the address of the trajectories since its first step."""
    step = one["from_step"]
    since = f"{here}?training_min={step}" if step is not None else ""
    return {**one, "known": CAUSES[one["cause"]], "since_url": since, "example": _token(one["example"])}


def _line(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, "percent": f"{100 * one['share']:.1f} %"}


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    """A token with its address and the difference."""
    place = f"row={one['row']}&view=tokens&t={one['offset']}-{one['offset'] + 1}"
    url = f"{reverse('trajectory', args=[one['trajectory']])}?{place}"
    d = one["trainer"] - one["sampler"]
    return {**one, "url": url, "d": d, "ratio": math.exp(min(d, 20)), "shown": visible_text(one.get("text", ""))}


@writes_run
def ask(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker to read the gap of a run, between the two columns that the form names."""
    asked = {name: request.POST.get(name, "").replace("\0", "")[:80] for name in ("sampler", "trainer")}
    named = {name: held for name, held in asked.items() if held}
    back = reverse("run-gap", args=[run.code])
    if is_active(run):
        return ask_for_job(request, run, KIND.slug, named, back, STILL_WORKS)
    return ask_for_job(request, run, KIND.slug, named, back, why_no_columns(run, **named), 422)
