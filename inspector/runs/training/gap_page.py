"""`/runs/<code>/gap`: how far trainer and sampler are apart on a run, why, and what each loss makes of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.runs.jobs.ask_for_job import STILL_WORKS, ask_for_job
from inspector.runs.jobs.job_values import ReportPage
from inspector.runs.loss_weights import section_of, weights_of
from inspector.runs.run_values import OfRun, RunValues
from inspector.web.access import may_write, reads_run, writes_run
from inspector.web.twins import fields_of, page
from rollout_inspector.diagnose.gap.cause_kinds import GapCause
from rollout_inspector.diagnose.gap.report import BY_CLASS, PARTS, causes_in
from rollout_inspector.streams.figures import percent_of
from rollout_inspector.text.html.text import visible_text
from rollouts.jobs.gap_reports import KIND, gap_key, gap_options, why_no_columns, why_no_gap
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Job, Run


@dataclass(frozen=True)
class GapPage(OfRun, ReportPage):
    """The gap of a run between trainer and sampler."""

    has_other: bool
    """Of trainer and teacher the other one was read, too."""
    report: dict[str, Any] | None
    """Figures, causes, undecided causes, worst tokens and tables; None until a job has ended."""


def gap_of(run: Run, teacher: bool | None = None) -> GapPage:
    """The stored report of a run, or why there is none. ``teacher``: that of a teacher's column; None = where there is
    no other. At most four queries."""
    jobs = latest_jobs(run, KIND.slug)
    of_teacher = ["teacher" in job.options for job in jobs]
    if teacher is None:
        teacher = all(of_teacher) and bool(jobs)
    has_other = (not teacher) in of_teacher
    jobs = [job for job in jobs if ("teacher" in job.options) == teacher]
    done = next((job for job in jobs if job.status == Job.Status.DONE and job.report), None)
    report = {name: value for name, value in (done.report or {}).items() if name != "key"} if done else None
    lack = "No column of a teacher was held against the student yet."
    why_not = "" if report is not None else lack if teacher else why_no_gap(run)
    return GapPage.of(run, jobs, done, gap_key, why_not, run=RunValues.of(run), has_other=has_other, report=report)


@reads_run
def gap(request: HttpRequest, run: Run) -> HttpResponse:
    """The page of the stored report and of the weights in the loss. At most six queries beside the run's own."""
    teacher = {"1": True, "0": False}.get(request.GET.get("teacher", ""))
    data, weights = gap_of(run, teacher), weights_of(run, request.GET)
    report = data.report
    html: dict[str, Any] = {
        "writer": may_write(request),
        "section": section_of(weights, run),
        "can_ask": may_write(request) and not data.live and not data.why_not,
    }
    if report is not None:
        here = reverse("run", args=[run.code])
        html |= {
            "causes": [_cause(entry, causes_in(report), here) for entry in report["causes"]],
            "undecided": [(causes_in(report)[name].title, sentence) for name, sentence in report["undecided"].items()],
            "sides": ("student", "teacher") if report["teacher"] else ("sampler", "trainer"),
            **{
                f"{name}_percent": percent_of((report["teacher"] or {}).get(f"{name}_share") or 0.0, 1)
                for name in ("carriers", "noise")
            },
            "tables": [
                (name.capitalize(), [_line(entry) for entry in lines]) for name, lines in report["parts"].items()
                if not name.startswith(BY_CLASS) or name.endswith("all tokens")
            ],
            "stacks": [
                (name.removeprefix(BY_CLASS), _stack(lines)) for name, lines in report["parts"].items()
                if name.startswith(BY_CLASS)
            ],
            "bitwise": _bitwise(report),
            "tokens": [_token(entry) for entry in report["worst"]],
            "compared": report["compared"] if report["compared"][1] else None,
            "has_text": any("text" in entry for entry in report["worst"]),
            "ids": [{**_line(entry), "shown": visible_text(entry.get("text", ""))} for entry in report["ids"]],
        }
    return page(request, "runs/gap.html", {**fields_of(data), "weights": weights}, **html)


def _cause(one: Mapping[str, Any], words: Mapping[str, GapCause], here: str) -> dict[str, Any]:
    """A named cause with its words and the address of the trajectories since its first step."""
    step = one["from_step"]
    since = f"{here}?training_min={step}" if step is not None else ""
    return {**one, "known": words[one["cause"]], "since_url": since, "example": _token(one["example"])}


def _stack(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a class as stretches of one bar, in percent of its length."""
    ends = list(accumulate((100 * line["share"] for line in lines), initial=0.0))
    return [
        {**line, "place": PARTS.index(line["name"]), "x": round(ends[n], 3), "width": round(ends[n + 1] - ends[n], 3)}
        for n, line in enumerate(lines)
    ]


def _bitwise(report: Mapping[str, Any]) -> str:
    """How many tokens have the same float32 on both sides."""
    share, tokens = (report.get("measures") or {}).get("bitwise_equal"), report["tokens"]
    return "" if share is None else f"{round((1 - share) * tokens):,} of {tokens:,} differ"


def _line(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"confident": None, "low": None, "high": None, **one, "percent": percent_of(one["share"], 1)}


def _token(one: Mapping[str, Any]) -> dict[str, Any]:
    """A token with its address and the difference."""
    place = f"row={one['row']}&view=tokens&t={one['offset']}-{one['offset'] + 1}"
    url = f"{reverse('trajectory', args=[one['trajectory']])}?{place}"
    d = one["trainer"] - one["sampler"]
    return {**one, "url": url, "d": d, "ratio": math.exp(min(d, 20)), "shown": visible_text(one.get("text", ""))}


@writes_run
def ask(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker to read the gap of a run, between the two columns that the form names."""
    params = {name: request.POST.get(name, "").replace("\0", "")[:80] for name in ("sampler", "trainer")}
    options = gap_options(**params, teacher=request.POST.get("teacher", "") in ("on", "1", "true"))
    back = reverse("run-gap", args=[run.code]) + f"?teacher={int('teacher' in options)}"
    if is_active(run):
        return ask_for_job(request, run, KIND.slug, options, back, STILL_WORKS)
    return ask_for_job(request, run, KIND.slug, options, back, why_no_columns(run, **params), 422)
