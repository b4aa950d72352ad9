"""The states of a launched run: its workers begin it, hand it back, take it over and settle it."""

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta

from django.db.models import Exists, F, OuterRef, Q
from django.utils import timezone

from rollouts.store.jobs.jobs import CLOCK_LEEWAY, take_back_heartbeats
from rollouts.store.models import ACTIVE, Run, StoredTrajectory
from rollouts.store.runs.runs import end_active_run, fail_run
from rollouts.store.trajectories.launched_trajectories import cancel_remaining, release_trajectories

log = logging.getLogger(__name__)
QUIET_SECONDS = 10.0
"""After three missed heartbeats the worker of a run is probably lost, and another worker may take the run."""
LOST_SECONDS = 15.0
"""A run that is queued for so long may have lost its message in a restart of Redis, so it is sent again. A worker with
a free place takes a message at once, and only such workers look. A second message changes nothing."""
MAX_LEASE = timedelta(seconds=30)  # No worker leases a trajectory for longer.


def begin(run_id: int) -> None:
    """A worker takes a run: the first worker sets its start, and each worker sets its heartbeat."""
    now = timezone.now()
    Run.objects.filter(pk=run_id, started_at=None).update(started_at=now)
    Run.objects.filter(pk=run_id, status__in=ACTIVE).update(status=Run.Status.RUNNING, heartbeat_at=now)


def settle(run_id: int, error: str = "") -> None:
    """Set the state of a run after one of its workers has nothing left to do. A second call changes nothing. ``error``:
    why the worker cannot continue; its leases are released. Then the run fails, unless another worker works on it."""
    run = Run.objects.filter(pk=run_id, status=Run.Status.RUNNING).first()
    if run is None:  # it was settled, or deleted
        return
    if run.cancel_requested:
        cancel_remaining(run)
        end_active_run(run, Run.Status.CANCELLED)
        return
    trajectories = run.trajectories
    if error:
        if trajectories.filter(status=StoredTrajectory.Status.RUNNING, lease_until__gte=timezone.now()).exists():
            log.warning("run left to its other workers run=%s reason=%s", run.code, error)
        else:
            fail_run(run, error)
        return
    if trajectories.filter(status__in=ACTIVE).exists():
        return  # another worker has them, or will take them when their leases have run out
    failed = trajectories.filter(status=StoredTrajectory.Status.FAILED)
    if not failed.exists() or trajectories.filter(status=StoredTrajectory.Status.DONE).exists():
        end_active_run(run, Run.Status.DONE)
    else:
        reason = failed.order_by("index").values_list("error", flat=True)[0]
        end_active_run(run, Run.Status.FAILED, f"Every trajectory failed; the first one: {reason}")


def hand_back(run_id: int, leased: Sequence[StoredTrajectory]) -> None:
    """A worker that stops releases its leases and clears the heartbeat, so that the next worker need not wait."""
    release_trajectories(leased)
    Run.objects.filter(pk=run_id, status=Run.Status.RUNNING).update(heartbeat_at=None)


def adopt_orphans(models: Collection[str]) -> list[Run]:
    """Returns runs of these models that have lost their worker or their message. Only one caller gets each run."""
    launches = Run.objects.filter(kind=Run.Kind.LAUNCH)
    take_back_heartbeats(launches)
    now = timezone.now()
    StoredTrajectory.objects.filter(  # from before the clock was set back
        run__in=launches.filter(status=Run.Status.RUNNING), status=StoredTrajectory.Status.RUNNING,
        lease_until__gt=now + MAX_LEASE + CLOCK_LEEWAY,
    ).update(lease_until=now + MAX_LEASE)
    quiet = Q(heartbeat_at=None) | Q(heartbeat_at__lt=now - timedelta(seconds=QUIET_SECONDS))
    its = StoredTrajectory.objects.filter(run=OuterRef("pk"))
    is_leased = Exists(its.filter(status=StoredTrajectory.Status.RUNNING, lease_until__gte=now))
    free = Exists(its.filter(status=StoredTrajectory.Status.QUEUED) | its.filter(lease_until__lt=now))
    long_ago = now - timedelta(seconds=LOST_SECONDS)
    is_waiting = Q(created_at__lt=long_ago) | Q(created_at__gt=now + CLOCK_LEEWAY)
    unheard = is_waiting & (Q(heartbeat_at=None) | Q(heartbeat_at__lt=long_ago))
    candidates = launches.filter(
        Q(status=Run.Status.RUNNING) & quiet & (free | ~is_leased) | Q(status=Run.Status.QUEUED) & unheard,
        model__in=list(models),
    )
    adopted = []
    for run in candidates.order_by(F("created_at")):
        # The caller that changes the heartbeat gets the run.
        unchanged = Run.objects.filter(pk=run.pk, status=run.status, heartbeat_at=run.heartbeat_at)
        if unchanged.update(heartbeat_at=now):
            log.warning("run taken over run=%s status=%s last_heartbeat=%s", run.code, run.status, run.heartbeat_at)
            adopted.append(run)
    return adopted


def running_launches(models: Collection[str], without: Collection[int]) -> list[Run]:
    """The running launches of these models that nobody asked to stop, the oldest first. One query."""
    runs = Run.objects.filter(kind=Run.Kind.LAUNCH, status=Run.Status.RUNNING, model__in=models, cancel_requested=False)
    return list(runs.exclude(pk__in=without).order_by("created_at"))


def count_queued(run: Run, limit: int) -> int:
    """The number of queued trajectories of a run, or ``limit`` where there are more. One query."""
    queued = run.trajectories.filter(status=StoredTrajectory.Status.QUEUED)
    return len(queued.values_list("pk")[:limit])
