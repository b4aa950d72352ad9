"""The states of a launched run as its workers move it: taken over, handed back, settled."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta

from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from rollouts import services
from rollouts.models import Run, StoredTrajectory

log = logging.getLogger(__name__)

QUIET_SECONDS = 10.0
"""Three heartbeats missed: the run's worker is probably gone, and what nobody holds a lease on is another one's."""
STALE_SECONDS = 20.0
"""A run under way without a heartbeat for so long has lost its worker: every lease of it has run out."""
LOST_SECONDS = 120.0
"""A run that has been queued for so long may have lost its message with a Redis that was restarted; ask again."""

_OPEN = (StoredTrajectory.Status.QUEUED, StoredTrajectory.Status.RUNNING)


def begin(run_id: int) -> None:
    """The first worker that takes a run starts its clock."""
    now = timezone.now()
    Run.objects.filter(pk=run_id, started_at=None).update(started_at=now)
    Run.objects.filter(pk=run_id, status=Run.Status.QUEUED).update(status=Run.Status.RUNNING, heartbeat_at=now)


def settle(run_id: int, error: str = "") -> None:
    """What the run is now that one of its workers has nothing left to do. A second call changes nothing.

    ``error``: the worker cannot go on, and has given back its leases. Nothing that is still queued can be made, unless
    another worker is at the run.
    """
    run = Run.objects.filter(pk=run_id, status=Run.Status.RUNNING).first()
    if run is None:  # it was settled, or deleted
        return
    if run.cancel_requested:
        services.cancel_remaining(run)
        _end(run, Run.Status.CANCELLED, "")
        return
    trajectories = run.trajectories
    if error:
        if trajectories.filter(status=StoredTrajectory.Status.RUNNING, lease_until__gte=timezone.now()).exists():
            log.warning("run left to its other workers run=%s reason=%s", run.code, error)
        else:
            fail(run, error)
        return
    if trajectories.filter(status__in=_OPEN).exists():
        return  # another worker has them, or their leases have yet to run out
    failed = trajectories.filter(status=StoredTrajectory.Status.FAILED)
    if not failed.exists() or trajectories.filter(status=StoredTrajectory.Status.DONE).exists():
        _end(run, Run.Status.DONE, "")
    else:
        reason = failed.order_by("index").values_list("error", flat=True)[0]
        _end(run, Run.Status.FAILED, f"Every trajectory failed; the first one: {reason}")


def fail(run: Run, error: str) -> None:
    """End a run with a reason; what was not made fails for the same one."""
    failed = run.trajectories.filter(status__in=_OPEN).update(
        status=StoredTrajectory.Status.FAILED, error=error, finished_at=timezone.now(), lease_until=None
    )
    Run.objects.filter(pk=run.pk).update(n_failed=F("n_failed") + failed)
    _end(run, Run.Status.FAILED, error)


def _end(run: Run, status: str, error: str) -> None:
    open_run = Run.objects.filter(pk=run.pk, status__in=(Run.Status.QUEUED, Run.Status.RUNNING))
    if open_run.update(status=status, error=error, finished_at=timezone.now()):
        services.take_figures(run)


def hand_back(run_id: int, leased: Sequence[StoredTrajectory]) -> None:
    """A worker that stops gives up its leases and its heartbeat, so that the next one need not wait for them."""
    services.release_trajectories(leased)
    Run.objects.filter(pk=run_id, status=Run.Status.RUNNING).update(heartbeat_at=None)


def is_silent(run: Run) -> bool:
    """Whether a run that should be under way shows no sign of life for so long that its worker or message is lost."""
    now = timezone.now()
    if run.status == Run.Status.RUNNING:
        last = run.heartbeat_at or run.started_at or run.created_at
        return last < now - timedelta(seconds=STALE_SECONDS)
    return run.status == Run.Status.QUEUED and (run.heartbeat_at or run.created_at) < now - timedelta(
        seconds=STALE_SECONDS
    )


def adopt_orphans(models: Collection[str]) -> list[Run]:
    """Runs of these models that have lost their worker or their message. Each is given to one caller alone."""
    now = timezone.now()
    quiet = Q(heartbeat_at=None) | Q(heartbeat_at__lt=now - timedelta(seconds=QUIET_SECONDS))
    its = StoredTrajectory.objects.filter(run=OuterRef("pk"))
    held = Exists(its.filter(status=StoredTrajectory.Status.RUNNING, lease_until__gte=now))
    free = Exists(its.filter(status=StoredTrajectory.Status.QUEUED) | its.filter(lease_until__lt=now))
    long_ago = now - timedelta(seconds=LOST_SECONDS)
    unheard = Q(created_at__lt=long_ago) & (Q(heartbeat_at=None) | Q(heartbeat_at__lt=long_ago))
    candidates = Run.objects.filter(
        Q(status=Run.Status.RUNNING) & quiet & (free | ~held) | Q(status=Run.Status.QUEUED) & unheard,
        kind=Run.Kind.LAUNCH,
        model__in=list(models),
    )
    adopted = []
    for run in candidates.order_by(F("created_at")):
        # Whoever changes the heartbeat has it.
        seen = Run.objects.filter(pk=run.pk, status=run.status, heartbeat_at=run.heartbeat_at)
        if seen.update(heartbeat_at=now):
            log.warning("run taken over run=%s status=%s last_heartbeat=%s", run.code, run.status, run.heartbeat_at)
            adopted.append(run)
    return adopted
