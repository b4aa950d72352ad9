"""What every loss makes of the tokens of a run, a section of its page *Gap*: from the sums that a worker made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse

from inspector.html.inspector_tags import finding_title
from inspector.runs.jobs.ask_for_job import ask_for_job
from inspector.runs.jobs.job_values import ReportPage
from inspector.web.access import reads_run, writes_run
from inspector.web.twins import wants_json
from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES
from rollout_inspector.streams import figures
from rollout_inspector.streams.strategies import about_strategy
from rollouts.jobs.loss_weights import MAX_REPLAYED, VERSION, run_key
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Job, Run
from rollouts.store.runs.muted import muted_in

DEFAULT_RULE, DEFAULT_MEAN = "grpo", "row_mean"
ORDER = {"error": 0, "warning": 1}
PARTS = {"tokens": "At its tokens", "rows": "In its rows", "trajectories": "In its trajectories"}
"""Part of the weight that findings of a kind hold -> head of its column."""
MAX_STEP_LINES = 100  # Training steps in the table; the twin has all.


@dataclass(frozen=True)
class LossWeights(ReportPage):
    """What every loss makes of the tokens of a run."""

    rule: str
    """The rule that the address names, whose shares the page shows."""
    mean: str
    """The mean that the address names."""
    steps: list[dict[str, int]]
    """By training step, in order: its tokens that the rule weighs (``known``), ``clipped`` and ``masked`` ones."""
    report: dict[str, Any] | None
    """The sums of every rule and mean; None until a job has ended. ``strategies`` is empty unless they were asked."""
    muted: list[str]
    """The kinds of findings that are muted in the run; they count all the same."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def weights_of(run: Run, params: Mapping[str, str]) -> LossWeights:
    """The sums of the last job that has ended, under the ``rule`` and the ``mean`` of an address. Two queries."""
    jobs = latest_jobs(run, "loss_weights")
    ended = (job for job in jobs if job.status == Job.Status.DONE and job.report)
    done = next((job for job in ended if (job.report or {}).get("version") == VERSION), None)
    report = {name: value for name, value in (done.report or {}).items() if name != "key"} if done else None
    steps = report.pop("steps", []) if report is not None else []
    notices: list[str] = []
    # An address that names no rule means one that weighs tokens.
    weighs = {line["rule"] for line in report["rules"] if line["known"]} if report else set()
    default = next((rule for rule in (DEFAULT_RULE, *RULES) if rule in weighs), DEFAULT_RULE)
    rule = _named(params.get("rule", ""), list(RULES), default, notices)
    return LossWeights.of(
        run, jobs, done, run_key, _why_not(run),
        rule=rule, mean=_named(params.get("mean", ""), list(MEANS), DEFAULT_MEAN, notices),
        steps=[{"training_step": line["training_step"], **line[rule]} for line in steps], report=report,
        muted=sorted(muted_in(run)), notices=notices,
    )


def _named(name: str, names: list[str], default: str, notices: list[str]) -> str:
    if name and name not in names:
        notices.append(f"“{name[:40]}” is none of {', '.join(names)}; {default} is shown.")
    return name if name in names else default


def _why_not(run: Run) -> str:
    if is_active(run):
        return "Weights are counted when the run has ended."
    return "" if run.n_finished else "This run holds no finished trajectory."


def section_of(weights: LossWeights, run: Run) -> dict[str, Any]:
    """What the section draws beside the value: the tables under its rule and mean."""
    report, mean = weights.report, weights.mean
    if report is None:
        return {"max_replayed": MAX_REPLAYED}
    index = list(RULES).index(weights.rule)
    weighed = report["rules"][index]
    kinds = [
        {
            "kind": kind, "severity": report["severities"].get(kind, "info"),
            "shares": [(head, percent(shares[part][mean])) for part, head in PARTS.items()],
        }
        for kind, shares in sorted(weighed["findings"].items(), key=lambda pair: -(pair[1]["rows"][mean] or 0.0))
        if shares["trajectories"][mean]
    ]
    return {
        "max_replayed": MAX_REPLAYED, "rule": RULES[weights.rule], "mean": MEANS[mean], "rules": RULES.values(),
        "means": MEANS.values(), "lines": [(RULES[line["rule"]], line) for line in report["rules"]],
        "is_known": bool(weighed["known"]), "kinds": sorted(kinds, key=lambda kind: ORDER.get(kind["severity"], 2)),
        "weightless": len(weighed["findings"]) - len(kinds), "list_url": reverse("run", args=[run.code]),
        "classes": [
            {**line, "name": line["class"], "share": percent(line["share"][mean])} for line in weighed["classes"]
        ],
        "steps": [{**line, "name": f"{line['training_step']:,}"} for line in weights.steps[-MAX_STEP_LINES:]],
        "strategies": [_strategy(line, index, mean) for line in report["strategies"]],
        "trainer_columns": ", ".join(report["trainer_columns"]),
    }


def percent(share: float | None) -> str:
    """A share in words; a dash where it is not known."""
    if share is None:
        return "–"
    return "0 %" if not share else "< 0.1 %" if share < 0.001 else figures.percent_of(share, 1)


def _strategy(line: dict[str, Any], index: int, mean: str) -> dict[str, Any]:
    rule = line["rules"][index]
    findings = {finding_title(kind): percent(shares["trajectories"][mean]) for kind, shares in rule["findings"].items()}
    return {
        **line, "name": line["strategy"].replace("_", " "), "about": about_strategy(line["strategy"]),
        "why": next(iter(line["why"]), ""), "rule": rule, "moved": percent(rule["moved"][mean]), "kinds": findings,
    }


@reads_run
def weights(request: HttpRequest, run: Run) -> HttpResponse:
    """The address that the section had as a page of its own."""
    query = f"?{request.GET.urlencode()}" if request.GET else ""
    if wants_json(request):
        return redirect(reverse("run-gap-json", args=[run.code]) + query, permanent=True)
    return redirect(f"{reverse('run-gap', args=[run.code])}{query}#weights", permanent=True)


@writes_run
def weigh(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker to sum the weights of a run; with ``strategies``, also under the rows of every strategy."""
    options = {"strategies": True} if request.POST.get("strategies") else {}
    back = f"{reverse('run-gap', args=[run.code])}#weights"
    return ask_for_job(request, run, "loss_weights", options, back, _why_not(run))
