"""Comments: those of a trajectory, one by its code, and how many the trajectories of a list have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django.db.models import Count, F, Q

from rollouts.store.models import Comment, StoredTrajectory


@dataclass(frozen=True)
class CommentCount:
    """How many comments a trajectory has."""

    n: int = 0
    n_open: int = 0
    """Those that nobody has resolved."""


def comments_of(trajectory: StoredTrajectory) -> list[Comment]:
    """The comments on the whole trajectory, then those on tokens by their place. One query."""
    place = (F("row_index").asc(nulls_first=True), F("start").asc(nulls_first=True), "id")
    found = list(Comment.objects.filter(trajectory=trajectory).order_by(*place))
    for one in found:
        one.trajectory = trajectory
    return found


def find_comment(trajectory: StoredTrajectory, code: str) -> Comment | None:
    """A comment of a trajectory by its code. One query."""
    found = Comment.objects.filter(trajectory=trajectory, code=code).first()
    if found is not None:
        found.trajectory = trajectory
    return found


def count_comments(trajectories: Sequence[StoredTrajectory]) -> dict[int, CommentCount]:
    """Key of a trajectory -> its comments; one without comments is missing. One query."""
    rows = (
        Comment.objects.filter(trajectory__in=[one.pk for one in trajectories])
        .order_by()
        .values_list("trajectory")
        .annotate(n=Count("pk"), n_open=Count("pk", filter=Q(resolved_at=None)))
    )
    return {key: CommentCount(n, n_open) for key, n, n_open in rows}
