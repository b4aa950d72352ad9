"""Comments on trajectories, where a change that came too late changes nothing, and which of them a user has seen."""

from collections.abc import Sequence
from typing import Any

from django.db.models import Count, F, Q, QuerySet
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Comment, Run, Seen, StoredTrajectory
from rollouts.store.people.activity_log import Action, record
from rollouts.store.text import storable_text
from rollouts.store.trajectories import trajectory_parts

MAX_TEXT = 4_000  # Characters of a comment.
MAX_COMMENTS = 500  # Comments of one trajectory: its page lists them all.
Place = tuple[int, int, int]  # A row, and the tokens ``[start, stop)`` of it.


def comments_of(trajectory: StoredTrajectory) -> list[Comment]:
    """The comments on the whole trajectory, then those on tokens by their place. One query."""
    place = (F("row_index").asc(nulls_first=True), F("start").asc(nulls_first=True), "id")
    comments = list(Comment.objects.filter(trajectory=trajectory).order_by(*place))
    for comment in comments:
        comment.trajectory = trajectory
    return comments


def find_comment(trajectory: StoredTrajectory, code: str) -> Comment | None:
    """A comment of a trajectory by its code. One query."""
    comment = Comment.objects.filter(trajectory=trajectory, code=code).first()
    if comment is not None:
        comment.trajectory = trajectory
    return comment


def count_comments(trajectories: Sequence[StoredTrajectory]) -> dict[int, tuple[int, int]]:
    """Key of a trajectory -> its comments, and those that nobody has resolved; one without is missing. One query."""
    rows = (
        Comment.objects.filter(trajectory__in=[trajectory.pk for trajectory in trajectories])
        .order_by()
        .values_list("trajectory")
        .annotate(n=Count("pk"), n_open=Count("pk", filter=Q(resolved_at=None)))
    )
    return {key: (n, n_open) for key, n, n_open in rows}


class CommentMoved(Refusal):
    """Somebody else was faster; the comment stays as they left it."""


def read_text(text: str) -> str:
    """The text as it is stored: line breaks kept, no space around it. Raises :class:`Refusal`."""
    text = storable_text(text.replace("\r\n", "\n").replace("\r", "\n")).strip()
    if not text:
        raise Refusal("Write something: the comment is empty.", field="text")
    if len(text) > MAX_TEXT:
        raise Refusal(f"Write at most {MAX_TEXT:,} characters; these are {len(text):,}.", field="text")
    return text


def check_place(trajectory: StoredTrajectory, place: Place) -> None:
    """Raises :class:`Refusal` unless the row holds the tokens, at least one. Two queries."""
    row, start, stop = place
    rows, _ = trajectory_parts.rows_and_steps(trajectory)
    if not 0 <= row < len(rows):
        range_of_rows = f"its rows are 0 to {len(rows) - 1}" if rows else "it has no rows"
        raise Refusal(f"There is no row {row} in this trajectory: {range_of_rows}.", field="row")
    n = rows[row].n_tokens
    if not 0 <= start < stop <= n:
        raise Refusal(
            f"Tokens {start:,}-{stop:,} are not in row {row}, which holds tokens 0-{n:,}. Name some of these.",
            field="t",
        )


def add_comment(trajectory: StoredTrajectory, author: Any, text: str, place: Place | None = None) -> Comment:
    """A new comment on tokens of a row; ``place`` None = on the whole trajectory. Raises :class:`Refusal`."""
    text = read_text(text)
    if place is not None:
        check_place(trajectory, place)
    if trajectory.comments.count() >= MAX_COMMENTS:
        raise Refusal(f"This trajectory has {MAX_COMMENTS} comments; it takes no more. Delete some.", field="text")
    row, start, stop = place or (None, None, None)
    comment = Comment.objects.create(
        trajectory=trajectory, row_index=row, start=start, stop=stop, text=text, author=author,
        author_name=author.get_username(),
    )
    record(Action.COMMENTED, trajectory, detail=f"comment {comment.code}")
    return comment


def edit_comment(comment: Comment, text: str, version: int) -> None:
    """Give a comment another text. ``version``: of the text that was read. Raises :class:`Refusal`, and
    :class:`CommentMoved` where the comment was edited or deleted since."""
    text = read_text(text)
    if text == comment.text and version == comment.version:
        return
    same = Comment.objects.filter(pk=comment.pk, version=version)
    if not same.update(text=text, version=version + 1, edited_at=timezone.now()):
        raise CommentMoved(
            "This comment was edited or deleted since you opened it. Your text stands below: look, and save again.",
            field="text",
        )
    record(Action.COMMENT_CHANGED, comment.trajectory, detail=f"comment {comment.code} edited")


def resolve_comment(comment: Comment, user: Any) -> None:
    """Say that a comment is settled. Raises :class:`CommentMoved` where somebody said so before, or deleted it."""
    still_open = Comment.objects.filter(pk=comment.pk, resolved_at=None)
    if not still_open.update(resolved_at=timezone.now(), resolved_by=user.get_username()):
        now = Comment.objects.filter(pk=comment.pk).first()
        raise CommentMoved(
            f"{now.resolved_by} has resolved this comment already." if now else "This comment was deleted.",
            field="form",
        )
    record(Action.COMMENT_CHANGED, comment.trajectory, detail=f"comment {comment.code} resolved")


def reopen_comment(comment: Comment) -> None:
    """Say that a comment is not settled. Raises :class:`CommentMoved` where it is open, or was deleted."""
    settled = Comment.objects.filter(pk=comment.pk, resolved_at__isnull=False)
    if not settled.update(resolved_at=None, resolved_by=""):
        is_there = Comment.objects.filter(pk=comment.pk).exists()
        raise CommentMoved("This comment is open already." if is_there else "This comment was deleted.", field="form")
    record(Action.COMMENT_CHANGED, comment.trajectory, detail=f"comment {comment.code} reopened")


def delete_comment(comment: Comment) -> None:
    """Delete a comment. One that is gone already is nothing to it."""
    if Comment.objects.filter(pk=comment.pk).delete()[0]:
        record(Action.COMMENT_DELETED, comment.trajectory, detail=f"comment {comment.code} of {comment.author_name}")


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
