"""Lists and summaries. The number of queries does not depend on the number of trajectories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Avg, Count, Exists, F, FloatField, Max, Min, OuterRef, Q, QuerySet, Sum, Value
from django.db.models.functions import Cast, Floor, Least

from rollout_inspector.diagnose.checks import CheckTotal, totals
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.figures import lost_or_wrong, reward_mean
from rollouts.store import models
from rollouts.store.paging import CursorPart, cut_part, read_cursor
from rollouts.store.people.access import Access

N_BINS = 20


@dataclass(frozen=True)
class RewardBin:
    """A bar of the histogram: rewards in ``[start, stop)``. The last bar includes ``stop``.

    Where all rewards are one of two values, there is a bar for each: ``start`` and ``stop`` are the value.
    """

    start: float
    """The least reward of the bar."""
    stop: float
    """Where the next bar begins."""
    n: int
    """Trajectories whose reward lies in it."""


NOT_INFO = ~Q(severity=Severity.INFO)
"""The findings that cost something."""
COST_UNKNOWN = Q(trained_tokens_lost=None) | Q(trained_tokens_wrong=None)
"""The findings of which nobody knows what they cost the stored rows."""


def cost_sum(column: str) -> Sum:
    """What findings cost, summed over a query of findings; ``column``: a field of :class:`Cost`."""
    return Sum(column, filter=NOT_INFO, default=0)


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


@dataclass(frozen=True)
class RunFilters:
    """Which runs are listed. An empty value, and an unknown status or kind, filters nothing."""

    text: str = ""
    """A part of the name or of the model, in upper or lower case, or a whole code."""
    status: str = ""
    kind: str = ""
    project: str = ""
    """A whole code. A project that is unknown or hidden has no runs."""
    tag: str = ""
    """A whole tag."""


def visible_runs(access: Access, filters: RunFilters, cursor: str, limit: int) -> CursorPart[models.Run]:
    """The runs that may be seen and pass, newest first, with their projects. One query.

    Raises ``ValueError`` for a cursor that cannot be read.
    """
    found = _filtered(access.limit(models.Run.objects.select_related("project")), filters)
    if last := read_cursor(cursor, "runs", datetime, int):
        at, key = last
        found = found.filter(Q(created_at__lt=at) | Q(created_at=at, pk__lt=key))
    items = list(found.order_by("-created_at", "-id")[: limit + 1])
    return cut_part("runs", items, limit, lambda run: (run.created_at, run.pk))


def runs_with_codes(access: Access, codes: Sequence[str]) -> list[models.Run]:
    """Of these codes the runs that may be seen, with their projects, newest first. One query."""
    found = access.limit(models.Run.objects.select_related("project")).filter(code__in=list(codes))
    return list(found.order_by("-created_at", "-id"))


def tags_of(runs: Sequence[models.Run]) -> dict[int, list[str]]:
    """Key of a run -> its tags by name. One query."""
    found: dict[int, list[str]] = {}
    for run, name in models.RunTag.objects.filter(run__in=runs).order_by("name").values_list("run", "name"):
        found.setdefault(run, []).append(name)
    return found


def known_tags(access: Access, limit: int) -> list[str]:
    """The first tags by name of the runs that may be seen. One query."""
    found = access.limit(models.RunTag.objects.all(), "run__project")
    return list(found.order_by("name").values_list("name", flat=True).distinct()[:limit])


def _filtered(found: QuerySet[models.Run], filters: RunFilters) -> QuerySet[models.Run]:
    """The runs of ``found`` that pass."""
    if filters.project:
        found = found.filter(project__code=filters.project)
    if text := filters.text:
        found = found.filter(Q(name__icontains=text) | Q(model__icontains=text) | Q(code=text))
    if filters.tag:
        found = found.filter(Exists(models.RunTag.objects.filter(run=OuterRef("pk"), name=filters.tag)))
    if filters.status in models.Run.Status.values:
        found = found.filter(status=filters.status)
    if filters.kind in models.Run.Kind.values:
        found = found.filter(kind=filters.kind)
    return found


@dataclass(frozen=True)
class RunTotals:
    """Added up over runs."""

    runs: int
    trajectories: int
    tokens: int
    complete: bool
    """False: there are more runs, of which the newest are counted."""


def total_runs(access: Access, filters: RunFilters, most: int = 1000) -> RunTotals:
    """Over the runs that may be seen and pass, the newest ``most``. One query."""
    found = _filtered(access.limit(models.Run.objects.all()), filters).order_by("-created_at", "-id")
    held = list(found.values_list("n_trajectories", "n_tokens")[: most + 1])
    counted = held[:most]
    return RunTotals(len(counted), sum(n for n, _ in counted), sum(n for _, n in counted), len(held) <= most)


def unfinished_launches(access: Access, limit: int) -> list[models.Run]:
    """Launched runs that may be seen and are queued or running, the oldest first. One query."""
    found = access.limit(models.Run.objects.all()).filter(status__in=models.ACTIVE, kind=models.Run.Kind.LAUNCH)
    return list(found.order_by("created_at", "pk")[:limit])


def find_run(templates: bool = False, **columns: Any) -> models.Run | None:
    """The run with these columns; ``templates`` loads its project, tokenizer and chat templates too. One query.

    Who asks for a user decides whether the user may see it (``inspector.web.access``).
    """
    found = models.Run.objects.filter(**columns)
    if templates:
        found = found.select_related("project", "tokenizer__chat_template", "chat_template", "rows_chat_template")
    return found.first()


def find_trajectory(code: str) -> models.StoredTrajectory | None:
    """A trajectory with its run and the run's tokenizer. One query."""
    return models.StoredTrajectory.objects.select_related("run__tokenizer").filter(code=code).first()


def count_running(run: models.Run) -> int:
    """Trajectories of a run that a worker is making. One query."""
    return run.trajectories.filter(status=models.StoredTrajectory.Status.RUNNING).count()


def failure_reasons(run: models.Run, limit: int = 1000) -> dict[str, int]:
    """Why trajectories failed -> how many did, of the first ``limit``. One query, or none where none failed."""
    if not run.n_failed:
        return {}
    failed = run.trajectories.filter(status=models.StoredTrajectory.Status.FAILED).order_by("index")
    return dict(Counter(failed.values_list("error", flat=True)[:limit]).most_common())


def list_rejections(run: models.Run, limit: int) -> list[models.Rejection]:
    """The first rejected lines of a run's files. One query, or none when every line was read."""
    return list(run.rejections.order_by("pk")[:limit]) if run.n_rejected else []


def find_finding_of_run(run: models.Run, kinds: Sequence[str]) -> models.StoredFinding | None:
    """Kind and evidence of the first finding of these kinds that has neither step nor row. One query."""
    found = run.findings.filter(kind__in=kinds, step_index=None, row_index=None)
    return found.only("kind", "evidence").order_by("pk").first()


def summary_from(values: dict[str, Any]) -> RunSummary:
    """The summary from the dict that ``dataclasses.asdict`` made of it."""
    bins = [RewardBin(**one) for one in values["reward_bins"]]
    checks = [CheckTotal(**one) for one in values["checks"]]
    return RunSummary(**{**values, "reward_bins": bins, "checks": checks})


def check_totals(found: QuerySet[models.StoredTrajectory]) -> tuple[dict[str, int], list[CheckTotal], int]:
    """Trajectories by status; of those that are done, what each check came to, and how many have no known outcome.

    One query.
    """
    rows = list(found.order_by().values_list("status", "checks").annotate(n=Count("pk")))
    statuses: Counter[str] = Counter()
    for status, _, n in rows:
        statuses[status] += n
    done = [(checks, n) for status, checks, n in rows if status == models.StoredTrajectory.Status.DONE]
    return dict(sorted(statuses.items())), totals(done), sum(n for checks, n in done if checks is None)


def count_severities(found: QuerySet[models.StoredTrajectory]) -> dict[int, dict[str, int]]:
    """Key of a run -> worst severity (empty = no finding) -> the number of its trajectories that have it. One query."""
    counts: dict[int, dict[str, int]] = {}
    rows = found.values_list("run", "worst_severity").annotate(n=Count("pk"))
    for run, severity, n in rows.order_by("run", "worst_severity"):
        counts.setdefault(run, {})[severity] = n
    return counts


def run_summary(run: models.Run) -> RunSummary:
    """Counts, reward histogram, findings by kind, stop reasons, checks. Six queries."""
    found = models.StoredTrajectory.objects.filter(run=run)
    statuses, checks, unknown = check_totals(found)
    reward = found.aggregate(
        n=Count("reward"),
        total=Sum("reward", default=0.0),
        low=Min("reward"),
        high=Max("reward"),
        square=Avg(F("reward") * F("reward")),
    )
    # Not Django's StdDev, which raises an error on SQLite when no trajectory has a reward.
    mean = reward_mean(reward["total"], reward["n"])
    spread = None if mean is None else math.sqrt(max(reward["square"] - mean * mean, 0.0))
    stops = dict(found.values_list("stop_reason").annotate(n=Count("pk")).order_by("-n", "stop_reason"))
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
        reward_bins=_histogram(found, reward["low"], reward["high"], reward["n"]),
        stop_reasons=stops,
        finding_counts={kind: n for kind, n, *_ in rows},
        finding_trajectories={kind: n for kind, _, n, *_ in rows},
        finding_severities={
            kind: {severity.value: n for severity, n in zip(Severity, counts, strict=True) if n}
            for kind, _, _, _, _, _, _, *counts in rows
        },
        finding_tokens={kind: tokens for kind, (tokens, _) in costs.items()},
        finding_one_row={kind: one_row for kind, (_, one_row) in costs.items()},
        severities=count_severities(found).get(run.pk, {}),
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
    held = bins.values_list("bin").annotate(n=Count("pk"), low=Min("reward"), high=Max("reward"))
    counts, ends = {}, set()
    for number, count, least, most in held:
        counts[int(number)] = count
        ends |= {least, most}
    if ends == {low, high}:
        return [RewardBin(low, low, counts[0]), RewardBin(high, high, counts[N_BINS - 1])]
    return [RewardBin(low + i * width, low + (i + 1) * width, counts.get(i, 0)) for i in range(N_BINS)]


@dataclass(frozen=True)
class SharedQuestion:
    """A trajectory of each of several runs, all called alike: with one seed, they answer the same question."""

    external_id: str
    sides: list[models.StoredTrajectory]
    """In the order of the runs."""


def shared_questions(runs: Sequence[models.Run], limit: int) -> list[SharedQuestion]:
    """The first trajectories that all runs have, those with an error before the others. Three queries."""
    of_any = models.StoredTrajectory.objects.filter(run__in=runs).order_by("index", "pk")
    wrong = of_any.filter(worst_severity=Severity.ERROR).values_list("external_id", flat=True)[: len(runs) * limit]
    others = of_any.filter(run=runs[0]).values_list("external_id", flat=True)[:limit]
    names = list(dict.fromkeys([*wrong, *others]))
    held = {(one.run_id, one.external_id): one for one in of_any.filter(external_id__in=names)}
    found = []
    for name in names:
        sides = [held[run.pk, name] for run in runs if (run.pk, name) in held]
        if len(sides) == len(runs):
            found.append(SharedQuestion(name, sides))
    return found[:limit]


@dataclass(frozen=True)
class GroupStats:
    """The trajectories of one prompt."""

    n: int
    n_rewards: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def has_no_signal(self) -> bool:
        """All rewards are equal, so each group-relative advantage is zero."""
        return self.n_rewards > 1 and self.low == self.high


def finding_kinds(trajectories: Sequence[models.StoredTrajectory]) -> dict[int, dict[str, str]]:
    """Key of a trajectory -> kind of its findings -> the worst severity of the kind, the worst first. One query."""
    keys = [one.pk for one in trajectories if one.n_findings]
    found: dict[int, dict[str, str]] = {}
    if keys:
        rows = models.StoredFinding.objects.filter(trajectory__in=keys).order_by().distinct()
        pairs = set(rows.values_list("trajectory", "severity", "kind"))
        worst_first = {severity.value: place for place, severity in enumerate(Severity)}
        for trajectory, severity, kind in sorted(pairs, key=lambda pair: (worst_first[pair[1]], pair[2])):
            found.setdefault(trajectory, {}).setdefault(kind, severity)
    return found


def group_stats(run: models.Run, groups: Sequence[str]) -> dict[str, GroupStats]:
    """The rewards of some groups of a run. One query."""
    found = models.StoredTrajectory.objects.filter(run=run, group__in=[group for group in groups if group])
    rows = found.values_list("group").annotate(
        n=Count("pk"), n_rewards=Count("reward"), total=Sum("reward", default=0.0), low=Min("reward"),
        high=Max("reward"),
    )
    return {group: GroupStats(n, scored, reward_mean(total, scored), *ends) for group, n, scored, total, *ends in rows}
