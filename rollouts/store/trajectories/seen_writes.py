"""Say, or take back, that somebody has looked at a trajectory."""

from __future__ import annotations

from typing import Any

from rollout_inspector.refusal import Refusal
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import Seen, StoredTrajectory


def mark_seen(trajectory: StoredTrajectory, user: Any, seen: bool = True) -> None:
    """Mark a trajectory as seen by a user, or as not seen; twice is as once.

    Raises :class:`Refusal` for one that still grows.
    """
    if not seen:
        Seen.objects.filter(user=user, trajectory=trajectory).delete()
    elif is_active(trajectory):
        raise Refusal("This trajectory still grows. Mark it as seen when it has ended.")
    else:
        Seen.objects.bulk_create([Seen(user=user, trajectory=trajectory)], ignore_conflicts=True)
