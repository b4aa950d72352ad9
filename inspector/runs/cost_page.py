"""`/runs/<code>/cost`: what the findings of a run cost, by kind, by step and along the run; and other strategies."""

from dataclasses import asdict, dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse

from inspector.html.charts import SHARES, highest_share, share_bars
from inspector.html.inspector_tags import finding_title, plural
from inspector.runs.cached_figures import cost_of
from inspector.runs.jobs.ask_for_job import tell
from inspector.runs.jobs.job_values import ReportPage
from inspector.runs.run_values import OfRun, RunValues
from inspector.web.access import reads_run, writes_run
from inspector.web.twins import page
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.figures import percent_of, share, trained_as_sampled
from rollout_inspector.streams.strategies import about_strategy
from rollouts.jobs import damage
from rollouts.jobs.broker import send_job
from rollouts.jobs.launch import served_models
from rollouts.jobs.replays import run_replays
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Job, Run
from rollouts.store.runs.damage import run_damage
from rollouts.store.runs.figures import KindCost, RunCost, TrainedTotals, slice_size
from rollouts.store.runs.muted import muted_in


@dataclass(frozen=True)
class RunStrategies(ReportPage):
    """What every strategy would have made of a run."""

    recorded: dict[str, Any] | None
    """What the run holds; None until a replay has ended."""
    lines: list[dict[str, Any]]
    """What each strategy would have made of it."""


def strategies_of(run: Run) -> RunStrategies:
    """The newest replay, and the report of the last one that was finished. One query beside the run's own."""
    jobs = latest_jobs(run, run_replays.KIND.slug)
    done = next((job for job in jobs if job.status == Job.Status.DONE and job.report), None)
    report = done.report if done is not None else None
    return RunStrategies.of(
        run, jobs, done, run_replays.run_key, _why_not(run), recorded=report["recorded"] if report else None,
        lines=[_line(line, report["recorded"]["tokens"], run) for line in report["strategies"]] if report else [],
    )


def _why_not(run: Run) -> str:
    """A sentence that says why nothing can be replayed; empty when the run can be replayed."""
    if is_active(run):
        return "Strategies are replayed when the run has ended."
    if not run.n_trajectories:
        return "This run holds no trajectory."
    if not run.n_steps:
        return "This run holds training rows without steps, and a strategy is replayed over steps."
    return ""


def _line(one: dict[str, Any], recorded_tokens: int, run: Run) -> dict[str, Any]:
    """A strategy as a line of the table. Shares count only trajectories that the strategy could replay."""
    replayed = one["trajectories"] - one["refused"]
    trained = trained_as_sampled(one["sampled"], one["lost"])
    times = one["tokens"] / recorded_tokens if recorded_tokens and not one["refused"] else None
    return {
        **one,
        "name": one["strategy"].replace("_", " "),
        "about": about_strategy(one["strategy"]),
        "is_own": one["strategy"] == run.strategy,
        "replayed": replayed,
        "trained_share": share(trained, one["sampled"]),
        "percent": percent_of(trained, one["sampled"]),
        "times": times,
        "times_words": "" if times is None else f"×{times:.2f}",
        "why": [{"sentence": sentence, "trajectories": n} for sentence, n in one["why"].items()],
    }


TICKS = 18  # Room for the labels below the axis.


@dataclass(frozen=True)
class KindLine(KindCost):
    """The cost of one kind of finding, with shares."""

    title: str  # The kind in words.
    share: float  # Of the run's trajectories, 0 to 1.
    percent: str  # The share in words; empty for a run without trajectories.
    lost_percent: str  # Lost tokens as a share of the sampled ones, in words.
    wrong_percent: str  # Wrong tokens as a share of the sampled ones, in words.
    url: str  # The trajectories that have this kind.
    muted: bool  # The project knows it in this run.
    damage: float | None  # The sum over its findings of share * relative error of the gradient; null = not measured.


@dataclass(frozen=True)
class CostPage(OfRun):
    """What the findings of a run cost."""

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
    damage: dict[str, Any]
    """Trajectories that were ``measured``, and the ``mean`` and ``largest`` relative error of their gradients."""
    strategies: RunStrategies
    """What every other strategy would have made of the run."""


@reads_run
def cost(request: HttpRequest, run: Run) -> HttpResponse:
    """What the findings of a run cost. The figures of a large run are stored; a small run needs five queries."""
    kind = request.GET.get("finding", "")[:40]
    total = run.n_trajectories
    run_cost = cost_of(run, kind)
    here = reverse("run", args=[run.code])
    also = f"&finding={kind}" if kind else ""
    damage_of_run = run_damage(run)
    damages = damage_of_run.pop("kinds")
    slices = _slices(total, run_cost.along)
    data = CostPage(
        run=RunValues.of(run), finding=kind, totals={**asdict(run_cost.totals), "foreign": run_cost.totals.foreign},
        kinds=[
            KindLine(
                **asdict(cost), title=finding_title(cost.kind), share=share(cost.trajectories, run.n_ended),
                percent=percent_of(cost.trajectories, run.n_ended),
                lost_percent=percent_of(cost.trained_tokens_lost or None, run.n_sampled),
                wrong_percent=percent_of(cost.trained_tokens_wrong or None, run.n_sampled),
                url=f"{here}?finding={cost.kind}", muted=cost.kind in muted_in(run), damage=damages.get(cost.kind),
            )
            for cost in run_cost.kinds
        ],
        by_step=[{"step": step, "trajectories": n} for step, n in run_cost.by_step], steps_beyond=run_cost.steps_beyond,
        along=[{"first": a, "last": b, "trajectories": n, "of": of} for a, b, n, of in slices],
        damage=damage_of_run, strategies=strategies_of(run),
    )
    step_bars = share_bars([(f"step {step}", n, total, f"{here}?at={step}{also}") for step, n in run_cost.by_step])
    slice_bars = share_bars(
        [(f"trajectories {a:,} to {b:,}", n, of, f"{here}?from={a}&to={b}&flawed=1{also}") for a, b, n, of in slices]
    )
    charts: list[dict[str, Any]] = [
        {"id": "by-step", "title": "By step", "head": "Step", "bars": step_bars, "axis": "step",
         "text": "Share of all trajectories that have a finding at that step."},
        {"id": "along", "title": "Along the run", "head": "Trajectories", "bars": slice_bars,
         "axis": "position in the run",
         "text": "Share of trajectories with a finding, from the first trajectory of the run to the last."},
    ]
    for chart in charts:
        chart["top"] = highest_share(chart["bars"])
    return page(
        request, "runs/cost.html", data, charts=charts, sums=_sums(run_cost), totals_text=_totals_text(run_cost.totals),
        chosen=finding_title(kind) if kind else "",
        width=SHARES.width, base=SHARES.base, top=SHARES.top, bottom=SHARES.base + TICKS,
        beyond=run_cost.steps_beyond, models=list(served_models()),
    )


@writes_run
def measure(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker of a model to measure the damage of the run."""
    back = reverse("run-cost", args=[run.code])
    try:
        job, is_new = damage.ask(run, request.POST.get("model", "").replace("\0", "")[:100], user=request.user)
    except Refusal as error:
        return tell(request, run, str(error), 422, back)
    if is_new and (sentence := send_job(job)):
        return tell(request, run, sentence, 503, back)
    return tell(request, run, "A worker of the model measures the damage of this run.", 202, back, job)


def _sums(found: RunCost) -> dict[str, int | None]:
    """The last line of the table. Lost and wrong come from the rows, so that no token counts twice."""
    is_known = bool(found.totals.sampled)
    return {
        "lost": found.totals.lost if is_known else None,
        "wrong": found.totals.foreign if is_known else None,
        "rows_more": sum(kind_cost.rows_more for kind_cost in found.kinds),
        "recomputed": sum(kind_cost.prompt_tokens_repaid for kind_cost in found.kinds),
    }


def _totals_text(totals: TrainedTotals) -> str:
    """What the rows train, as a sentence; empty when no trajectory has steps."""
    if not totals.sampled:
        return ""
    trained = f"The rows of this run train {plural(totals.trained, 'token')}."
    if totals.lost is None or totals.foreign is None:
        what = f" of {plural(totals.unknown, 'trajectory,trajectories')}" if totals.unknown else ""
        return (
            f"{trained} How many sampled tokens they lose is not known{what}: too little is recorded, or an older "
            "version diagnosed it. Then diagnose the run again."
        )
    lost = f"They lose {totals.lost:,} of {plural(totals.sampled, 'sampled token')}"
    others = f", and train {plural(totals.foreign, 'token')} not as sampled" if totals.foreign else ""
    return f"{trained} {lost}{others}."


def _slices(total: int, along: list[int]) -> list[tuple[int, int, int, int]]:
    """(first, last, trajectories with a finding, trajectories) of equal stretches of the run."""
    size = slice_size(total)
    return [
        (start, min(start + size, total) - 1, along[number], min(size, total - start))
        for number, start in enumerate(range(0, total, size))
    ]
