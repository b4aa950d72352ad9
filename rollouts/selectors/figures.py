"""The figures of a run: its summary, and the cost of its findings. A large run stores them when it ends."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.db.models import Count, F, IntegerField, Max, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Floor

from rollouts.models import Run, RunFigures, StoredFinding, StoredTrajectory
from rollouts.selectors.runs import RunSummary, run_summary, summary_from
from rollouts.tito.diagnose.finding import Severity

VERSION = 3
"""Goes up when the rules of counting change."""
LARGE = 5_000
"""With more trajectories, counting is too slow for a page."""
SLICES = 20
"""Equal stretches of a run."""
MAX_STEPS = 40


@dataclass(frozen=True)
class KindCost:
    """The findings of one kind, added up over a run."""

    kind: str
    findings: int
    trajectories: int
    trained_tokens_lost: int
    trained_tokens_wrong: int
    rows_more: int
    prompt_tokens_repaid: int


@dataclass(frozen=True)
class Spread:
    """The places of the findings, of one kind or of all kinds."""

    by_step: list[tuple[int, int]]
    """(step, trajectories with a finding at it), for the first steps."""
    steps_beyond: int
    """The number of later steps with findings, which are left out."""
    along: list[int]
    """Trajectories with a finding in each of :data:`SLICES` equal stretches of the run."""


@dataclass(frozen=True)
class RunCost:
    """What the findings of a run cost."""

    kinds: list[KindCost]
    spread: Spread


def is_large(run: Run) -> bool:
    return run.n_trajectories > LARGE


def state_of(run: Run) -> str:
    """A hash of all totals of a run. Figures with another hash are stale."""
    totals = (
        VERSION, run.status, run.n_trajectories, run.n_finished, run.n_failed, run.n_steps, run.n_tokens, run.n_rewards,
        run.reward_sum, sorted(run.finding_counts.items()), run.diagnosis_version,
    )  # fmt: skip
    return hashlib.sha256(repr(totals).encode()).hexdigest()


def count(run: Run) -> dict[str, Any]:
    """All figures, as a JSON object."""
    kinds = run_kinds(run)
    spreads = {kind: asdict(run_spread(run, kind)) for kind in ("", *(one.kind for one in kinds))}
    body = {"summary": asdict(run_summary(run)), "kinds": [asdict(one) for one in kinds], "spreads": spreads}
    return dict(json.loads(json.dumps(body)))


def stored_figures(run: Run) -> dict[str, Any] | None:
    """The figures that were counted at the end of a large run; None for a small run, or when the run has changed."""
    held = RunFigures.objects.filter(run=run).first() if is_large(run) else None
    return held.body if held is not None and held.state == state_of(run) else None


def summary_in(body: dict[str, Any]) -> RunSummary:
    return summary_from(body["summary"])


def worst_of(runs: Sequence[Run]) -> dict[int, tuple[str, int]]:
    """Key of a run -> the worst severity of its findings, and the number of trajectories with it. At most two queries.

    A large run without stored figures is left out.
    """
    diagnosed = [run for run in runs if any(run.finding_counts.values())]
    counts: dict[int, dict[str, int]] = {}
    large = {run.pk: run for run in diagnosed if is_large(run)}
    if large:
        for found in RunFigures.objects.filter(run__in=large):
            if found.state == state_of(large[found.run_id]):
                counts[found.run_id] = summary_in(found.body).severities
    small = [run.pk for run in diagnosed if run.pk not in large]
    if small:
        held = StoredTrajectory.objects.filter(run__in=small).exclude(worst_severity="")
        for run, severity, n in held.values_list("run", "worst_severity").annotate(n=Count("pk")):
            counts.setdefault(run, {})[severity] = n
    return {
        run: next((severity.value, held[severity]) for severity in Severity if held.get(severity))
        for run, held in counts.items()
        if any(held.get(severity) for severity in Severity)
    }


def cost_in(body: dict[str, Any], kind: str) -> RunCost:
    held = body["spreads"].get(kind) or {"by_step": [], "steps_beyond": 0, "along": [0] * SLICES}
    spread = Spread([(step, n) for step, n in held["by_step"]], held["steps_beyond"], held["along"])
    return RunCost([KindCost(**one) for one in body["kinds"]], spread)


def run_cost(run: Run, kind: str = "") -> RunCost:
    """The cost of all kinds, and the places of the findings of one kind (empty = of all). Four queries."""
    return RunCost(run_kinds(run), run_spread(run, kind))


def run_kinds(run: Run) -> list[KindCost]:
    """The cost of each kind of a run, the most frequent first. Two queries."""
    counts = ~Q(severity=Severity.INFO)  # an info finding costs nothing
    rows = (
        StoredFinding.objects.filter(run=run)
        .values("kind")
        .annotate(
            findings=Count("pk"),
            trajectories=Count("trajectory", distinct=True),
            trained_tokens_lost=Sum("trained_tokens_lost", filter=counts, default=0),
            trained_tokens_wrong=Sum("trained_tokens_wrong", filter=counts, default=0),
            prompt_tokens_repaid=Sum("prompt_tokens_repaid", filter=counts, default=0),
        )
        .order_by("-trajectories", "kind")
    )
    # The additional rows of a trajectory count once for each kind.
    more: Counter[str] = Counter()
    several = StoredFinding.objects.filter(counts, run=run, rows__gt=1)
    for kind, _, n in several.values_list("kind", "trajectory").annotate(n=Max("rows")).order_by():
        more[kind] += n - 1
    return [KindCost(**row, rows_more=more[row["kind"]]) for row in rows]


def run_spread(run: Run, kind: str = "") -> Spread:
    """The places of the findings of a kind (empty = of all kinds). Two queries."""
    found = StoredFinding.objects.filter(run=run)
    if kind:
        found = found.filter(kind=kind)
    rows = list(
        found.filter(step_index__isnull=False)
        .values_list("step_index")
        .annotate(n=Count("trajectory", distinct=True))
        .order_by("step_index")
    )
    return Spread(rows[:MAX_STEPS], max(len(rows) - MAX_STEPS, 0), _along(found, run.n_trajectories))


def slice_size(total: int) -> int:
    """Trajectories in each of the equal stretches."""
    return max(-(-total // SLICES), 1)


def _along(found: QuerySet[StoredFinding], total: int) -> list[int]:
    place = Cast(Floor(F("trajectory__index") / Value(float(slice_size(total)))), IntegerField())
    counts = dict(found.values_list(place).annotate(n=Count("trajectory", distinct=True)))
    return [counts.get(number, 0) for number in range(SLICES)]
