"""`/runs/<code>/weights`: what every loss makes of the tokens of a run, from the sums that a worker made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.html.inspector_tags import finding_title
from inspector.runs.ask_for_job import ask_for_job
from inspector.runs.jobs import JobLine
from inspector.runs.pages import RunValues
from inspector.web.access import reads_run, writes_run
from inspector.web.twins import Page, page, wants_json, whole_number
from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES, LossRule
from rollout_inspector.streams.strategies import about_strategy
from rollouts.jobs.loss_weights import KIND, MAX_REPLAYED, VERSION, run_key
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.job_lists import latest_jobs
from rollouts.store.models import Job, Run
from rollouts.store.runs.muted import muted_in

DEFAULT_RULE, DEFAULT_MEAN = "grpo", "row_mean"
ORDER = {"error": 0, "warning": 1}
MAX_STEP_LINES = 100
"""Training steps in the table; the twin has all."""


@dataclass(frozen=True)
class WeightsPage(Page):
    """What every loss makes of the tokens of a run."""

    run: RunValues
    """The run."""
    rule: str
    """The rule that the address names, whose shares the page shows."""
    mean: str
    """The mean that the address names."""
    job: JobLine | None
    """The newest job that sums weights."""
    live: bool
    """That job still changes."""
    why_not: str
    """Why nothing can be summed; empty when it can."""
    stale: bool
    """The run has changed since the sums were made."""
    made_at: datetime | None
    """When the sums were made."""
    steps: list[dict[str, int]]
    """By training step, in order: its tokens that the rule weighs (``known``), ``clipped`` and ``masked`` ones."""
    weights: dict[str, Any] | None
    """The sums of every rule and mean; None until a job has ended. ``strategies`` is empty unless they were asked."""
    muted: list[str]
    """The kinds of findings that are muted in the run; they count all the same."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


@dataclass(frozen=True)
class RuleLine:
    """A rule in the table."""

    rule: LossRule
    url: str
    """The page with this rule."""
    is_shown: bool
    known: int
    clipped: str
    masked: str
    """Shares of the tokens that it weighs, in words."""
    why_not: list[dict[str, Any]]


@dataclass(frozen=True)
class KindShare:
    """What the findings of a kind hold of the weight, in words."""

    kind: str
    title: str
    severity: str
    muted: bool
    url: str
    shares: list[tuple[str, str]]
    """Head of the column, and the share."""
    has_weight: bool
    """Its trajectories have some of the weight."""


@reads_run
def weights(request: HttpRequest, run: Run) -> HttpResponse:
    """The sums of the last job that has ended, `?rule=` and `?mean=`. One query beside the run's own."""
    asked = latest_jobs(run, KIND.slug)
    ended = (job for job in asked if job.status == Job.Status.DONE and job.report)
    done = next((job for job in ended if (job.report or {}).get("version") == VERSION), None)
    report = dict(done.report or {}) if done is not None else None
    stale = report is not None and report.pop("key") != run_key(run)
    notices: list[str] = []
    named = {
        "rule": _named(request.GET.get("rule", ""), list(RULES), _first_rule(report), notices),
        "mean": _named(request.GET.get("mean", ""), list(MEANS), DEFAULT_MEAN, notices),
    }
    held = report.pop("steps", []) if report is not None else []
    least, most = (whole_number(request.GET.get(name, "").strip()) for name in ("training_min", "training_max"))
    shown = WeightsPage(
        run=RunValues.of(run), **named, job=JobLine.of(asked[0], run) if asked else None,
        live=bool(asked) and is_active(asked[0]), why_not=_why_not(run), stale=stale,
        made_at=done.finished_at if done is not None else None,
        steps=_steps(held, named["rule"], least, most), weights=report, muted=sorted(muted_in(run)),
        notices=notices,
    )  # fmt: skip
    if wants_json(request) or report is None:
        return page(request, "runs/weights.html", shown, rules=RULES.values(), max_replayed=MAX_REPLAYED)
    index = list(RULES).index(shown.rule)
    kinds = _kinds(run, shown, report, index)
    answer = page(
        request, "runs/weights.html", shown, rules=RULES.values(), means=MEANS.values(), max_replayed=MAX_REPLAYED,
        rule_shown=RULES[shown.rule], mean_shown=MEANS[shown.mean], lines=_lines(shown, report),
        is_known=bool(report["rules"][index]["known"]),
        kinds=[one for one in kinds if one.has_weight], weightless=sum(not one.has_weight for one in kinds),
        steps_shown=shown.steps[-MAX_STEP_LINES:], is_narrowed=least is not None or most is not None,
        strategies=_strategies(report, index, shown.mean),
        classes=_classes(report["rules"][index]["classes"], shown.mean),
        trainer_columns=", ".join(report["trainer_columns"]),
    )  # fmt: skip
    if request.headers.get("HX-Request") == "true" and not shown.live:
        answer["HX-Refresh"] = "true"  # the job has ended: the page is loaded again, with its charts
    return answer


def _steps(held: list[dict[str, Any]], rule: str, least: int | None, most: int | None) -> list[dict[str, int]]:
    """The counts of a rule by training step, of the steps that are asked for."""
    return [
        {"training_step": step, **line[rule]}
        for line in held
        if (step := line["training_step"]) >= (least or 0) and (most is None or step <= most)
    ]


def _named(asked: str, known: list[str], default: str, notices: list[str]) -> str:
    if asked and asked not in known:
        notices.append(f"“{asked[:40]}” is none of {', '.join(known)}; {default} is shown.")
    return asked if asked in known else default


def _first_rule(report: dict[str, Any] | None) -> str:
    """The rule of an address that names none: one that weighs tokens."""
    weighs = {line["rule"] for line in report["rules"] if line["known"]} if report else set()
    return next((rule for rule in (DEFAULT_RULE, *RULES) if rule in weighs), DEFAULT_RULE)


def _why_not(run: Run) -> str:
    if is_active(run):
        return "Weights are counted when the run has ended."
    return "" if run.n_finished else "This run holds no finished trajectory."


def _lines(shown: WeightsPage, report: dict[str, Any]) -> list[RuleLine]:
    return [
        RuleLine(
            RULES[line["rule"]], f"?rule={line['rule']}&mean={shown.mean}", line["rule"] == shown.rule, line["known"],
            _of(line["clipped"], line["known"]), _of(line["masked"], line["known"]), line["why_not"],
        )
        for line in report["rules"]
        if line["rule"] in RULES
    ]  # fmt: skip


def _of(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "–"


def percent(share: float | None) -> str:
    """A share in words; a dash where it is not known."""
    if share is None:
        return "–"
    return "0 %" if not share else "< 0.1 %" if share < 0.001 else f"{100 * share:.1f} %"


def _kinds(run: Run, shown: WeightsPage, report: dict[str, Any], index: int) -> list[KindShare]:
    """The kinds that hold most weight by their rows first, errors before the others."""
    heads = {"tokens": "At its tokens", "rows": "In its rows", "trajectories": "In its trajectories"}
    found = report["rules"][index]["findings"]
    here, severities = reverse("run", args=[run.code]), report["severities"]
    made = [
        (
            (ORDER.get(severities.get(kind, ""), 2), -(held["rows"][shown.mean] or 0.0), kind),
            KindShare(
                kind, finding_title(kind), severities.get(kind, "info"), kind in shown.muted,
                f"{here}?finding={kind}", [(heads[what], percent(held[what][shown.mean])) for what in heads],
                bool(held["trajectories"][shown.mean]),
            ),
        )
        for kind, held in found.items()
    ]  # fmt: skip
    return [one for _, one in sorted(made, key=lambda pair: pair[0])]


def _classes(lines: list[dict[str, Any]], mean: str) -> list[tuple[dict[str, Any], str, str, str]]:
    """Each class of tokens with its shares in words: clipped, masked, and of the weight."""
    return [
        (one, _of(one["clipped"], one["known"]), _of(one["masked"], one["known"]), percent(one["share"][mean]))
        for one in lines
    ]


def _strategies(report: dict[str, Any], index: int, mean: str) -> list[dict[str, Any]]:
    found = []
    for line in report["strategies"]:
        rule = line["rules"][index]
        found.append(
            {
                "name": line["strategy"].replace("_", " "),
                "about": about_strategy(line["strategy"]),
                "trajectories": line["trajectories"],
                "refused": line["refused"],
                "why": next(iter(line["why"]), ""),
                "rows": line["rows"],
                "tokens": line["tokens"],
                "known": _of(rule["known"], line["tokens"]),
                "clipped": _of(rule["clipped"], rule["known"]),
                "masked": _of(rule["masked"], rule["known"]),
                "compared": rule["compared"],
                "moved": percent(rule["moved"][mean]),
                "kinds": [
                    (finding_title(kind), percent(held["trajectories"][mean]))
                    for kind, held in rule["findings"].items()
                ],
            }
        )
    return found


@writes_run
def weigh(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker to sum the weights of a run; with ``strategies``, also under the rows of every strategy."""
    options = {"strategies": True} if request.POST.get("strategies") else {}
    return ask_for_job(request, run, KIND.slug, options, reverse("run-weights", args=[run.code]), _why_not(run))
