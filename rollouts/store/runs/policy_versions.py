"""Figures of a run by policy version: counted from the tables, and as they are stored.

A trajectory belongs to the version that sampled its first step. Where several sampled it, a finding says so.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Max, Min, OuterRef, Q, Subquery

from rollout_inspector.streams.batches import batched
from rollouts.store.models import PolicyVersionFigures, Run, StoredFinding, StoredStep, StoredTrajectory
from rollouts.store.runs.runs import cost_sum
from rollouts.store.runs.training_steps import PARAMETERS, TRUNCATED, FiguresLine, figures_by

MAX_VERSIONS = 5_000
"""Versions of a run that are counted. A source that writes another one for each trajectory has no versions."""


def _version(trajectory: str) -> Subquery:
    """The version of the first step of the trajectory that a column names."""
    first = StoredStep.objects.filter(trajectory=OuterRef(trajectory), index=0)
    return Subquery(first.values("policy_version")[:1])


def versions_of(run: Run, keys: Sequence[int] | None = None) -> set[str]:
    """The versions of some trajectories of a run; None = of all, and no more than can be counted.

    One query, or one for each :data:`PARAMETERS` trajectories.
    """
    found = StoredStep.objects.filter(index=0).exclude(policy_version="").order_by()
    if keys is None:
        held = found.filter(trajectory__run=run).values_list("policy_version", flat=True).distinct()
        return set(held[: MAX_VERSIONS + 1])
    return {
        version
        for part in batched(keys, PARAMETERS)
        for version in found.filter(trajectory__in=part).values_list("policy_version", flat=True).distinct()
    }


def first_place_of(run: Run, versions: Collection[str]) -> int | None:
    """The first position in the run of a trajectory of these versions, as far as is counted. One query."""
    counted = PolicyVersionFigures.objects.filter(run=run, version__in=list(versions))
    found: int | None = counted.aggregate(n=Min("first_index"))["n"]
    return found


def count_policy_versions(
    run: Run, versions: Collection[str] | None = None, first: int = 0
) -> list[PolicyVersionFigures]:
    """The figures of these versions (None = of all), not stored. A version without trajectories is left out.

    ``first``: none of their trajectories stands before this position in the run. Six queries.
    """
    chosen = Q(policy__isnull=False) & ~Q(policy="")
    if versions is not None:
        chosen &= Q(policy__in=list(versions))
    of_run = StoredTrajectory.objects.filter(run=run, index__gte=first)
    held = of_run.annotate(policy=_version("pk")).filter(chosen).order_by()
    of_findings = StoredFinding.objects.filter(run=run)
    of_steps = StoredStep.objects.filter(trajectory__run=run)
    if first:  # by the keys of the few trajectories: else a database reads all of the run
        of_findings = StoredFinding.objects.filter(trajectory__in=of_run.values("pk"))
        of_steps = StoredStep.objects.filter(trajectory__in=of_run.values("pk"))
    found = of_findings.annotate(policy=_version("trajectory")).filter(chosen).order_by()
    kinds: dict[str, dict[str, int]] = defaultdict(dict)
    repaid: dict[str, int] = defaultdict(int)
    lines: Any = found.values_list("policy", "kind").annotate(
        n=Count("trajectory", distinct=True), again=cost_sum("prompt_tokens_repaid")
    )
    for version, kind, n, again in lines:
        kinds[version][kind] = n
        repaid[version] += again
    told: Any = of_steps.annotate(policy=_version("trajectory")).filter(chosen)
    cut = Count("trajectory", distinct=True, filter=Q(finish_reason=TRUNCATED))
    truncated = dict(told.exclude(finish_reason="").order_by().values_list("policy").annotate(n=cut))
    steps: Any = held.values_list("policy").annotate(low=Min("training_step"), high=Max("training_step"))
    range_of = {version: rest for version, *rest in steps}
    return [
        PolicyVersionFigures(
            run=run, version=version, first_training_step=range_of[version][0], last_training_step=range_of[version][1],
            **fields,
        )
        for version, fields in figures_by(held, "policy", kinds, repaid, truncated)
        if version in range_of  # another one was stored in between
    ]


@dataclass(frozen=True, kw_only=True)
class PolicyVersionLine(FiguresLine):
    """The figures of one policy version."""

    version: str
    """As the source names it."""
    first_training_step: int | None
    """Of its trajectories; None = not recorded."""
    last_training_step: int | None


def over_versions(run: Run) -> list[PolicyVersionLine]:
    """The stored figures of a run by policy version, in the order of the versions. One query.

    Versions that differ by a number at their end are ordered by it. Others are ordered by their first trajectory.
    """
    held = list(PolicyVersionFigures.objects.filter(run=run).order_by("first_index", "version"))
    parts = [re.fullmatch(r"(.*?)([0-9]{1,18})", one.version, re.DOTALL) for one in held]
    if len({part[1] if part else None for part in parts}) == 1 and all(parts):
        numbers = {one.version: int(part[2]) for one, part in zip(held, parts, strict=True) if part}
        held.sort(key=lambda one: (numbers[one.version], one.version))
    return [
        PolicyVersionLine(
            version=one.version, first_training_step=one.first_training_step,
            last_training_step=one.last_training_step, **PolicyVersionLine.columns(one),
        )
        for one in held
    ]


def has_versions(run: Run) -> bool:
    """Whether figures by policy version are stored of a run. One query."""
    return PolicyVersionFigures.objects.filter(run=run).exists()
