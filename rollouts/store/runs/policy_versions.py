"""Figures of a run by policy version: counted from the tables, stored, and read. A trajectory belongs to the version
that sampled its first step. Where several sampled it, a finding says so."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import Max, Min, OuterRef, Q, Subquery

from rollout_inspector.streams.batches import batched
from rollouts.store.models import PolicyVersionFigures, Run, StoredFinding, StoredStep, StoredTrajectory
from rollouts.store.runs.training_steps import PARAMETERS, FiguresLine, figures_by

MAX_VERSIONS = 5_000
"""Versions of a run that are counted. A source that writes another one for each trajectory has no versions."""


def _version(trajectory: str) -> Subquery:
    """The version of the first step of the trajectory that a column names."""
    first = StoredStep.objects.filter(trajectory=OuterRef(trajectory), index=0)
    return Subquery(first.values("policy_version")[:1])


def versions_of(run: Run, keys: Sequence[int] | None = None) -> set[str]:
    """The versions of some trajectories of a run; None = of all, and no more than can be counted. One query, or one for
    each :data:`PARAMETERS` trajectories."""
    first_steps = StoredStep.objects.filter(index=0).exclude(policy_version="").order_by()
    if keys is None:
        versions = first_steps.filter(trajectory__run=run).values_list("policy_version", flat=True).distinct()
        return set(versions[: MAX_VERSIONS + 1])
    return {
        version
        for part in batched(keys, PARAMETERS)
        for version in first_steps.filter(trajectory__in=part).values_list("policy_version", flat=True).distinct()
    }


def first_place_of(run: Run, versions: Collection[str]) -> int | None:
    """The first position in the run of a trajectory of these versions, as far as is counted. One query."""
    counted = PolicyVersionFigures.objects.filter(run=run, version__in=list(versions))
    place: int | None = counted.aggregate(n=Min("first_index"))["n"]
    return place


def count_policy_versions(
    run: Run, versions: Collection[str] | None = None, first: int = 0
) -> list[PolicyVersionFigures]:
    """The figures of these versions (None = of all), not stored. A version without trajectories is left out. ``first``:
    none of their trajectories stands before this position in the run. Six queries."""
    chosen = Q(policy__isnull=False) & ~Q(policy="")
    if versions is not None:
        chosen &= Q(policy__in=list(versions))
    of_run = StoredTrajectory.objects.filter(run=run, index__gte=first)
    trajectories = of_run.annotate(policy=_version("pk")).filter(chosen).order_by()
    of_findings = StoredFinding.objects.filter(run=run)
    of_steps = StoredStep.objects.filter(trajectory__run=run)
    if first:  # by the keys of the few trajectories: else a database reads all of the run
        of_findings = StoredFinding.objects.filter(trajectory__in=of_run.values("pk"))
        of_steps = StoredStep.objects.filter(trajectory__in=of_run.values("pk"))
    parts: list[Any] = [
        records.annotate(policy=_version("trajectory")).filter(chosen) for records in (of_findings, of_steps)
    ]
    steps: Any = trajectories.values_list("policy").annotate(low=Min("training_step"), high=Max("training_step"))
    range_of = {version: step_range for version, *step_range in steps}
    return [
        PolicyVersionFigures(
            run=run, version=version, first_training_step=range_of[version][0], last_training_step=range_of[version][1],
            **fields,
        )
        for version, fields in figures_by(trajectories, "policy", parts[0], parts[1], "policy")
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
    """The last one, alike."""


def over_versions(run: Run) -> list[PolicyVersionLine]:
    """The stored figures of a run by policy version, in the order of the versions. One query. Versions that differ by a
    number at their end are ordered by it. Others are ordered by their first trajectory."""
    figures = list(PolicyVersionFigures.objects.filter(run=run).order_by("first_index", "version"))
    parts = [re.fullmatch(r"(.*?)([0-9]{1,18})", line.version, re.DOTALL) for line in figures]
    if len({part[1] if part else None for part in parts}) == 1 and all(parts):
        numbers = {line.version: int(part[2]) for line, part in zip(figures, parts, strict=True) if part}
        figures.sort(key=lambda one: (numbers[one.version], one.version))
    return [
        PolicyVersionLine(
            version=line.version, first_training_step=line.first_training_step,
            last_training_step=line.last_training_step, **PolicyVersionLine.columns(line),
        )
        for line in figures
    ]


def has_versions(run: Run) -> bool:
    """Whether figures by policy version are stored of a run. One query."""
    return PolicyVersionFigures.objects.filter(run=run).exists()


def take_policy_versions(run: Run, versions: Collection[str] | None = None, first: int = 0) -> None:
    """Count the figures of these policy versions of a run again; None = of all. It may be repeated. ``first``: none of
    their trajectories stands before this position in the run. A run with more versions than can be counted has no
    figures by version."""
    stored = PolicyVersionFigures.objects.filter(run=run)
    if versions is None:
        of_run = versions_of(run)
        if not of_run or len(of_run) > MAX_VERSIONS:
            stored.delete()
            return
    elif not versions or stored.count() > MAX_VERSIONS:
        return
    figures = count_policy_versions(run, versions, first)
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        (stored if versions is None else stored.filter(version__in=list(versions))).delete()
        PolicyVersionFigures.objects.bulk_create(figures, batch_size=200)
