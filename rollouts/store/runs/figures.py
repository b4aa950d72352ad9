"""The figures of a run: its summary, and the cost of its findings. A large run stores them when it ends."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from django.db.models import Count, F, IntegerField, Max, Q, Sum, Value
from django.db.models.functions import Cast, Floor

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.figures import lost_or_wrong, trained_otherwise
from rollouts.store.models import Run, RunFigures, StoredFinding, StoredTrajectory
from rollouts.store.runs.run_summary import NOT_INFO, RunSummary, cost_sum, count_severities, run_summary

VERSION = 5  # Goes up when the rules of counting change.
LARGE = 5_000  # With more trajectories, counting is too slow for a page.
SLICES = 20  # Equal stretches of a run.
MAX_STEPS = 40


@dataclass(frozen=True)
class KindCost:
    """The findings of one kind, added up over a run."""

    kind: str
    findings: int
    trajectories: int
    trained_tokens_lost: int | None  # In the stored rows. None = not known of some finding.
    trained_tokens_wrong: int | None  # In the stored rows. None = not known of some finding.
    rows_more: int
    prompt_tokens_repaid: int
    lost_in_one_row: int  # What would be lost if a row went on over each break.
    severity: str  # The worst severity of these findings.

    @property
    def tokens(self) -> int:
        """Tokens lost and wrong, as far as they are known."""
        return lost_or_wrong(self.trained_tokens_lost, self.trained_tokens_wrong)


@dataclass(frozen=True)
class TrainedTotals:
    """What the rows of a run train, counted over trajectories that have steps. No token counts twice."""

    sampled: int
    trained: int
    lost: int | None  # Sampled, and trained in no row as they were sampled. None = not known of some trajectory.
    unknown: int = 0  # Trajectories of which it is not known what their rows lose.

    @property
    def foreign(self) -> int | None:
        """Trained, and not sampled as they stand or trained once more."""
        return None if self.lost is None else trained_otherwise(self.trained, self.sampled, self.lost)


@dataclass(frozen=True)
class RunCost:
    """What the findings of a run cost."""

    kinds: list[KindCost]
    totals: TrainedTotals
    by_step: list[tuple[int, int]]  # (step, trajectories with a finding at it), for the first steps.
    steps_beyond: int  # The number of later steps with findings, which are left out.
    along: list[int]  # Trajectories with a finding in each of :data:`SLICES` equal stretches of the run.


def is_large(run: Run) -> bool:
    return run.n_trajectories > LARGE


def state_of(run: Run) -> str:
    """A hash of all totals of a run. Figures with another hash are stale."""
    totals = (
        VERSION, run.status, run.n_trajectories, run.n_finished, run.n_failed, run.n_steps, run.n_tokens, run.n_rewards,
        run.reward_sum, sorted(run.finding_counts.items()), run.diagnosis_version,
    )
    return hashlib.sha256(repr(totals).encode()).hexdigest()


def count(run: Run) -> dict[str, Any]:
    """All figures, as a JSON object."""
    kinds = run_kinds(run)
    spreads = {kind: run_spread(run, kind) for kind in ("", *(cost.kind for cost in kinds))}
    body = {"summary": run_summary(run), "kinds": kinds, "spreads": spreads, "totals": run_totals(run)}
    return dict(msgspec.to_builtins(body))


def stored_figures(run: Run) -> dict[str, Any] | None:
    """The figures that were counted at the end of a large run; None for a small run, or when the run has changed."""
    figures = RunFigures.objects.filter(run=run).first() if is_large(run) else None
    return figures.body if figures is not None and figures.state == state_of(run) else None


def summary_in(body: dict[str, Any]) -> RunSummary:
    return msgspec.convert(body["summary"], RunSummary)


def severities_of(runs: Sequence[Run]) -> dict[int, dict[str, int]]:
    """Key of a run -> worst severity -> the number of its trajectories that have it. At most two queries. A large run
    without stored figures is left out."""
    diagnosed = [run for run in runs if any(run.finding_counts.values())]
    counts: dict[int, dict[str, int]] = {}
    large = {run.pk: run for run in diagnosed if is_large(run)}
    if large:
        for figures in RunFigures.objects.filter(run__in=large):
            if figures.state == state_of(large[figures.run_id]):
                counts[figures.run_id] = summary_in(figures.body).severities
    small = [run.pk for run in diagnosed if run.pk not in large]
    if small:
        counts |= count_severities(StoredTrajectory.objects.filter(run__in=small).exclude(worst_severity=""))
    return {
        run: {severity.value: of_run[severity] for severity in Severity if of_run.get(severity)}
        for run, of_run in counts.items()
        if any(of_run)
    }


def cost_in(body: dict[str, Any], kind: str) -> RunCost:
    place = body["spreads"].get(kind) or {"by_step": [], "steps_beyond": 0, "along": [0] * SLICES}
    return msgspec.convert({"kinds": body["kinds"], "totals": body["totals"], **place}, RunCost)


def run_cost(run: Run, kind: str = "") -> RunCost:
    """The cost of all kinds, and the places of the findings of one kind (empty = of all). Five queries."""
    return RunCost(run_kinds(run), run_totals(run), **run_spread(run, kind))


def run_totals(run: Run) -> TrainedTotals:
    """What the rows of the ended trajectories train. One query."""
    trajectories = StoredTrajectory.objects.filter(run=run, n_rows__gt=0, n_steps__gt=0)
    sums = trajectories.aggregate(
        sampled=Sum("n_sampled", default=0), trained=Sum("n_trained", default=0), lost=Sum("n_lost", default=0),
        unknown=Count("pk", filter=Q(n_lost=None)),
    )
    return TrainedTotals(**sums | {"lost": None} if sums["unknown"] else sums)


def run_kinds(run: Run) -> list[KindCost]:
    """The cost of each kind of a run, the one that costs most tokens first. Two queries."""
    rows = (
        StoredFinding.objects.filter(run=run)
        .values("kind")
        .annotate(
            findings=Count("pk"),
            trajectories=Count("trajectory", distinct=True),
            prompt_tokens_repaid=cost_sum("prompt_tokens_repaid"),
            lost_in_one_row=cost_sum("lost_in_one_row"),
            **{severity.value: Count("pk", filter=Q(severity=severity)) for severity in Severity},
            **{f"sum_{name}": cost_sum(name) for name in _UNSURE},
            **{f"unknown_{name}": Count("pk", filter=NOT_INFO & Q(**{name: None})) for name in _UNSURE},
        )
        .order_by("-trajectories", "kind")
    )
    # The additional rows of a trajectory count once for each kind.
    more: Counter[str] = Counter()
    several = StoredFinding.objects.filter(NOT_INFO, run=run, rows__gt=1)
    for kind, _, n in several.values_list("kind", "trajectory").annotate(n=Max("rows")).order_by():
        more[kind] += n - 1
    costs = []
    for row in rows:
        columns: dict[str, Any] = dict(row)
        for name in _UNSURE:
            total, unknown = columns.pop(f"sum_{name}"), columns.pop(f"unknown_{name}")
            columns[name] = None if unknown else total
        counts = {severity.value: columns.pop(severity.value) for severity in Severity}
        worst = next(severity for severity, n in counts.items() if n)
        costs.append(KindCost(**columns, rows_more=more[columns["kind"]], severity=worst))
    order = [severity.value for severity in Severity]
    return sorted(
        costs, key=lambda one: (-one.tokens, -one.lost_in_one_row, order.index(one.severity), -one.trajectories)
    )


def worst_severities(run: Run) -> dict[str, str]:
    """Kind -> the worst severity of its findings in a run. One query. A large run has none until it is counted."""
    if is_large(run):
        body = stored_figures(run)
        return {cost["kind"]: cost["severity"] for cost in body["kinds"]} if body else {}
    pairs = set(StoredFinding.objects.filter(run=run).order_by().values_list("kind", "severity").distinct())
    return {kind: severity.value for severity in reversed(Severity) for kind, worst in pairs if worst == severity}


_UNSURE = ("trained_tokens_lost", "trained_tokens_wrong")  # Costs that are not known of every finding.


def run_spread(run: Run, kind: str = "") -> dict[str, Any]:
    """The places of the findings of a kind (empty = of all kinds), by the names of :class:`RunCost`. Two queries."""
    findings = StoredFinding.objects.filter(run=run)
    if kind:
        findings = findings.filter(kind=kind)
    rows = list(
        findings.filter(step_index__isnull=False)
        .values_list("step_index")
        .annotate(n=Count("trajectory", distinct=True))
        .order_by("step_index")
    )
    place = Cast(Floor(F("trajectory__index") / Value(float(slice_size(run.n_trajectories)))), IntegerField())
    counts = dict(findings.values_list(place).annotate(n=Count("trajectory", distinct=True)))
    return {
        "by_step": rows[:MAX_STEPS],
        "steps_beyond": max(len(rows) - MAX_STEPS, 0),
        "along": [counts.get(number, 0) for number in range(SLICES)],
    }


def slice_size(total: int) -> int:
    """Trajectories in each of the equal stretches."""
    return max(-(-total // SLICES), 1)
