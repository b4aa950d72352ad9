"""Figures of a run by policy version: counted from the tables, stored, and read. A trajectory belongs to the version
that sampled its first step. Where several sampled it, a finding says so. While data is pushed,
the figures of a run are counted at most once in some seconds: each push may bring a few trajectories of a step."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Max, Min, OuterRef, Q, Subquery
from django.utils import timezone

from rollout_inspector.streams.batches import batched
from rollouts.store.models import PolicyVersionFigures, PushedFigures, Run, StoredFinding, StoredStep, StoredTrajectory
from rollouts.store.runs.training_steps import PARAMETERS, FiguresLine, figures_by, stored_after, take_training_steps
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO

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
    return [PolicyVersionLine.of(line) for line in figures]


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


COUNT_SECONDS = 5.0  # The figures of a run are counted again at most so often while data is pushed to it.
LOST_SECONDS = 300.0  # A count that took longer was lost with its worker, and is begun again.
MAX_PLACES = 50_000
"""Versions whose trajectories are further apart in their run are counted when it is diagnosed as a whole."""


def note_uncounted(run: Run, counted_to: int) -> None:
    """Remember that pushed trajectories were diagnosed and are not counted. Call it after they were stored.
    ``counted_to``: the key of the last trajectory that was diagnosed before, for a run that was never pushed to."""
    now = timezone.now()
    figures, is_new = PushedFigures.objects.get_or_create(run=run, defaults={"counted_to": counted_to, "due_at": now})
    if not is_new and figures.due_at is None:
        PushedFigures.objects.filter(run=run, due_at=None).update(due_at=max(now, _next(figures)))


def _next(held: PushedFigures) -> datetime:
    """When the figures may be counted again."""
    last = held.counted_at
    return timezone.now() if last is None else last + timedelta(seconds=COUNT_SECONDS)


def count_due(run: Run | None = None) -> int:
    """Count what was pushed to a run, or to any, and is due. Returns the number of runs that were counted."""
    now = timezone.now()
    far = now + timedelta(seconds=COUNT_SECONDS + LOST_SECONDS)  # written before the clock was set back
    due = PushedFigures.objects.filter(Q(due_at__lte=now) | Q(due_at__gt=far)).select_related("run")
    return sum(_count(figures) for figures in (due if run is None else due.filter(run=run)))


def _count(held: PushedFigures) -> bool:
    """Count what was pushed since the last count. False: another worker does."""
    mine = PushedFigures.objects.filter(run=held.run_id, due_at=held.due_at)
    if not mine.update(due_at=timezone.now() + timedelta(seconds=LOST_SECONDS)):
        return False
    run = Run.objects.get(pk=held.run_id)
    to = int(run.settings.get(DIAGNOSED_TO, 0))
    new = stored_after(run, held.counted_to).filter(pk__lte=to).values_list("pk", "index", "training_step")
    keys, places, training_steps = zip(*new, strict=True) if new else ((), (), ())
    if steps := {step for step in training_steps if step is not None}:
        take_training_steps(run, steps)
    if versions := versions_of(run, keys):
        # The first position of a trajectory of these versions, as far as is counted.
        of_versions = PolicyVersionFigures.objects.filter(run=run, version__in=list(versions))
        counted = of_versions.aggregate(n=Min("first_index"))["n"]
        first = min(places) if counted is None else min(counted, *places)
        if run.n_trajectories - first <= MAX_PLACES:
            take_policy_versions(run, versions, first)
    with transaction.atomic():  # what was diagnosed meanwhile is due next, whoever comes first
        now = Run.objects.select_for_update(no_key=True).get(pk=run.pk)
        done = PushedFigures(run=run, counted_to=to, counted_at=timezone.now(), due_at=None)
        if int(now.settings.get(DIAGNOSED_TO, 0)) > to:
            done.due_at = _next(done)
        done.save()
    return True
