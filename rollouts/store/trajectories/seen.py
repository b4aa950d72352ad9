"""Which trajectories a user has looked at."""

from collections.abc import Sequence
from typing import Any

from django.db.models import QuerySet

from rollout_inspector.refusal import Refusal
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import Run, Seen, StoredTrajectory


def is_seen(trajectory: StoredTrajectory, reader: int) -> bool:
    """Whether the user with this key has seen a trajectory. One query."""
    return Seen.objects.filter(user=reader, trajectory=trajectory).exists()


def seen_among(trajectories: Sequence[StoredTrajectory], reader: int) -> set[int]:
    """The keys of those that the user has seen. One query."""
    marks = Seen.objects.filter(user=reader, trajectory__in=[record.pk for record in trajectories])
    return set(marks.values_list("trajectory", flat=True))


def seen_in_run(run: Run, reader: int) -> QuerySet[Seen]:
    """What the user has seen of a run."""
    return Seen.objects.filter(user=reader, trajectory__run=run)


def mark_seen(trajectory: StoredTrajectory, user: Any, seen: bool = True) -> None:
    """Mark a trajectory as seen by a user, or as not seen; twice is as once. Raises :class:`Refusal` for one that still
    grows."""
    if not seen:
        Seen.objects.filter(user=user, trajectory=trajectory).delete()
    elif is_active(trajectory):
        raise Refusal("This trajectory still grows. Mark it as seen when it has ended.")
    else:
        Seen.objects.bulk_create([Seen(user=user, trajectory=trajectory)], ignore_conflicts=True)
