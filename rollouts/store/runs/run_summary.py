"""The summary of a run. The number of queries does not depend on the number of trajectories."""

import math
from collections import Counter
from dataclasses import dataclass, field

from django.db.models import Avg, Count, F, FloatField, Max, Min, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Floor, Least

from rollout_inspector.diagnose.checks import CheckTotal, totals
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.figures import lost_or_wrong, reward_mean
from rollouts.store import models

N_BINS = 20


@dataclass(frozen=True)
class RewardBin:
    """A bar of the histogram: rewards in ``[start, stop)``. The last bar includes ``stop``. Where all rewards are one
    of two values, there is a bar for each: ``start`` and ``stop`` are the value."""

    start: float
    """The least reward of the bar."""
    stop: float
    """Where the next bar begins."""
    n: int
    """Trajectories whose reward lies in it."""


NOT_INFO = ~Q(severity=Severity.INFO)  # The findings that cost something.
COST_UNKNOWN = Q(trained_tokens_lost=None) | Q(trained_tokens_wrong=None)
"""The findings of which nobody knows what they cost the stored rows."""


@dataclass(frozen=True)
class RunSummary:
    """What the run page shows beside the list."""

    by_status: dict[str, int]
    """State -> trajectories."""
    n_rewards: int
    """Trajectories with a reward."""
    reward_mean: float | None
    """Of these rewards; None = there is none. So are the next three."""
    reward_min: float | None
    """The least reward."""
    reward_max: float | None
    """The greatest reward."""
    reward_std: float | None
    """The standard deviation of these rewards, which are taken for all there are."""
    reward_bins: list[RewardBin]
    """The histogram, the least rewards first; one bar when all are equal, none without rewards."""
    stop_reasons: dict[str, int]
    """Reason -> trajectories, the most frequent first. The empty reason counts trajectories without one."""
    finding_counts: dict[str, int]
    """Kind -> findings."""
    finding_trajectories: dict[str, int] = field(default_factory=dict)
    """Kind -> trajectories that have it."""
    finding_severities: dict[str, dict[str, int]] = field(default_factory=dict)
    """Kind -> severity -> findings, without zeros. One kind can have findings of several severities."""
    finding_tokens: dict[str, int | None] = field(default_factory=dict)
    """Kind -> tokens that the rows lose or train wrongly; None = not known. Info findings count none."""
    finding_one_row: dict[str, int] = field(default_factory=dict)
    """Kind -> tokens that would be lost if a row went on over each break. Info findings count none."""
    severities: dict[str, int] = field(default_factory=dict)
    """Worst severity -> trajectories. The empty severity counts trajectories without findings."""
    checks: list[CheckTotal] = field(default_factory=list)
    """What each check of the diagnosis came to, over the trajectories that are done."""
    checks_unknown: int = 0
    """Trajectories that are done and whose checks are not known: an earlier version diagnosed them, or none yet."""


def check_totals(found: QuerySet[models.StoredTrajectory]) -> tuple[dict[str, int], list[CheckTotal], int]:
    """Trajectories by status; of those that are done, what each check came to, and how many have no known outcome. One
    query."""
    rows = list(found.order_by().values_list("status", "checks").annotate(n=Count("pk")))
    statuses: Counter[str] = Counter()
    for status, _, n in rows:
        statuses[status] += n
    done = [(checks, n) for status, checks, n in rows if status == models.StoredTrajectory.Status.DONE]
    return dict(sorted(statuses.items())), totals(done), sum(n for checks, n in done if checks is None)


def cost_sum(column: str) -> Sum:
    """What findings cost, summed over a query of findings; ``column``: a field of :class:`Cost`."""
    return Sum(column, filter=NOT_INFO, default=0)


def count_severities(trajectories: QuerySet[models.StoredTrajectory]) -> dict[int, dict[str, int]]:
    """Key of a run -> worst severity (empty = no finding) -> the number of its trajectories that have it. One query."""
    counts: dict[int, dict[str, int]] = {}
    rows = trajectories.values_list("run", "worst_severity").annotate(n=Count("pk"))
    for run, severity, n in rows.order_by("run", "worst_severity"):
        counts.setdefault(run, {})[severity] = n
    return counts


def run_summary(run: models.Run) -> RunSummary:
    """Counts, reward histogram, findings by kind, stop reasons, checks. Six queries."""
    trajectories = models.StoredTrajectory.objects.filter(run=run)
    statuses, checks, unknown = check_totals(trajectories)
    reward = trajectories.aggregate(
        n=Count("reward"),
        total=Sum("reward", default=0.0),
        low=Min("reward"),
        high=Max("reward"),
        square=Avg(F("reward") * F("reward")),
    )
    # Not Django's StdDev, which raises an error on SQLite when no trajectory has a reward.
    mean = reward_mean(reward["total"], reward["n"])
    spread = None if mean is None else math.sqrt(max(reward["square"] - mean * mean, 0.0))
    stops = dict(trajectories.values_list("stop_reason").annotate(n=Count("pk")).order_by("-n", "stop_reason"))
    kinds = models.StoredFinding.objects.filter(run=run).values_list("kind").annotate(
        n=Count("pk"),
        trajectories=Count("trajectory", distinct=True),
        lost=cost_sum("trained_tokens_lost"),
        wrong=cost_sum("trained_tokens_wrong"),
        unknown=Count("pk", filter=NOT_INFO & COST_UNKNOWN),
        one_row=cost_sum("lost_in_one_row"),
        **{severity.value: Count("pk", filter=Q(severity=severity)) for severity in Severity},
    ).order_by("-n", "kind")
    rows = list(kinds)
    costs = {
        kind: (None if unknown else lost_or_wrong(lost, wrong), one_row)
        for kind, _, _, lost, wrong, unknown, one_row, *_ in rows
    }
    return RunSummary(
        by_status=statuses,
        n_rewards=reward["n"],
        reward_mean=mean,
        reward_min=reward["low"],
        reward_max=reward["high"],
        reward_std=spread,
        reward_bins=_histogram(trajectories, reward["low"], reward["high"], reward["n"]),
        stop_reasons=stops,
        finding_counts={kind: n for kind, n, *_ in rows},
        finding_trajectories={kind: n for kind, _, n, *_ in rows},
        finding_severities={
            kind: {severity.value: n for severity, n in zip(Severity, counts, strict=True) if n}
            for kind, _, _, _, _, _, _, *counts in rows
        },
        finding_tokens={kind: tokens for kind, (tokens, _) in costs.items()},
        finding_one_row={kind: one_row for kind, (_, one_row) in costs.items()},
        severities=count_severities(trajectories).get(run.pk, {}),
        checks=checks,
        checks_unknown=unknown,
    )


def _histogram(
    found: QuerySet[models.StoredTrajectory], low: float | None, high: float | None, n: int
) -> list[RewardBin]:
    """Bars of equal width from the least to the greatest reward; one bar when all are equal."""
    if low is None or high is None or not n:
        return []
    width = (high - low) / N_BINS
    if width <= 0 or not math.isfinite(width):
        return [RewardBin(low, high, n)]
    # The database counts, because a run may have a million trajectories.
    position = Floor((F("reward") - Value(low)) / Value(width), output_field=FloatField())
    bins = found.filter(reward__isnull=False).annotate(bin=Least(Cast(position, FloatField()), Value(N_BINS - 1.0)))
    rows = bins.values_list("bin").annotate(n=Count("pk"), low=Min("reward"), high=Max("reward"))
    counts, ends = {}, set()
    for number, count, least, most in rows:
        counts[int(number)] = count
        ends |= {least, most}
    if ends == {low, high}:
        return [RewardBin(low, low, counts[0]), RewardBin(high, high, counts[N_BINS - 1])]
    return [RewardBin(low + i * width, low + (i + 1) * width, counts.get(i, 0)) for i in range(N_BINS)]
