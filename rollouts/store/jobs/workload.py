"""What waits, what is under way and what is stored. The number of queries does not grow with the data."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import connection
from django.db.models import Count, Min, Sum
from django.utils import timezone

from rollouts.store.models import ACTIVE, Job, Run, StoredTrajectory, WorkStatus

SUMMED = ("n_trajectories", "n_failed", "n_rejected", "n_steps", "n_rows", "n_tokens", "n_sampled")
"""Totals of runs that are summed."""


@dataclass(frozen=True)
class Workload:
    """Work that has not ended."""

    jobs: dict[tuple[str, str], int]  # (kind, state) -> jobs.
    runs: dict[tuple[str, str], int]  # (kind, state) -> runs.
    job_seconds: dict[str, float]  # Kind -> how long the oldest job of this kind has waited for a worker, in seconds.
    run_seconds: dict[str, float]  # Kind -> how long the oldest run of this kind has waited for a worker, in seconds.
    live: dict[str, int]  # Model -> trajectories that are being sampled.


@dataclass(frozen=True)
class Stored:
    """What the database holds."""

    totals: dict[str, int]  # Name, one of :data:`SUMMED` or ``n_runs`` -> the sum over all runs.
    findings: dict[str, int]  # Kind -> findings.
    jobs: dict[str, dict[str, int]] = field(default_factory=dict)  # Kind -> state -> jobs that have ended.
    database_bytes: int = 0


def workload() -> Workload:
    """Three queries."""
    now = timezone.now()
    jobs = _by_kind_and_state(Job)
    runs = _by_kind_and_state(Run)
    live = StoredTrajectory.objects.filter(
        run__kind=Run.Kind.LAUNCH, run__status__in=ACTIVE, status=WorkStatus.RUNNING
    ).values_list("run__model")
    return Workload(
        jobs={key: n for key, (n, _) in jobs.items()},
        runs={key: n for key, (n, _) in runs.items()},
        job_seconds=_waited(jobs, now),
        run_seconds=_waited(runs, now),
        live=dict(live.annotate(n=Count("pk")).order_by()),
    )


def stored() -> Stored:
    """Four queries. Two of them read every run and every job, so that callers keep the answer for a while."""
    totals: dict[str, Any] = Run.objects.aggregate(n_runs=Count("pk"), **{name: Sum(name) for name in SUMMED})
    findings: Counter[str] = Counter()
    for counts in Run.objects.exclude(finding_counts={}).values_list("finding_counts", flat=True).iterator(1000):
        findings.update(counts)
    ended: dict[str, dict[str, int]] = {}
    for kind, status, n in (
        Job.objects.exclude(status__in=ACTIVE).values_list("kind", "status").annotate(n=Count("pk")).order_by()
    ):
        ended.setdefault(kind, {})[status] = n
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_database_size(current_database())")
        else:
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
        n_bytes = int(cursor.fetchone()[0])
    return Stored({name: value or 0 for name, value in totals.items()}, dict(findings), ended, n_bytes)


def _by_kind_and_state(model: Any) -> dict[tuple[str, str], tuple[int, datetime]]:
    active = model.objects.filter(status__in=ACTIVE).values_list("kind", "status")
    return {(kind, status): (n, first) for kind, status, n, first in
            active.annotate(n=Count("pk"), first=Min("created_at")).order_by()}


def _waited(found: dict[tuple[str, str], tuple[int, datetime]], now: datetime) -> dict[str, float]:
    return {
        kind: max((now - first).total_seconds(), 0.0)
        for (kind, status), (_, first) in found.items()
        if status == WorkStatus.QUEUED
    }
