"""What people say of a trajectory: its comments, as the pages draw them and the twins write them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from django.http import HttpRequest
from django.urls import reverse

from inspector.runs.muted import MutedValues, muted_values
from inspector.trajectories.tabs import is_text_only
from inspector.web.access import access, reader_of
from inspector.web.twins import Page, from_columns
from rollouts.store.models import Comment, Role, StoredTrajectory
from rollouts.store.trajectories.comments import comments_of, is_seen


@dataclass(frozen=True)
class CommentValues(Page):
    """A comment."""

    code: str
    """Names it in addresses."""
    url: str
    """Its permalink: the place that it is about."""
    row: int | None
    """The row that it is about; null = the whole trajectory."""
    start: int | None
    """The first token of the row that it is about."""
    stop: int | None
    """The first token behind those."""
    text: str
    """Plain text with line breaks."""
    author: str
    """The name of who wrote it."""
    created_at: datetime
    """When it was written."""
    edited_at: datetime | None
    """When its text was changed last."""
    version: int
    """Goes up with each edit of the text."""
    resolved_at: datetime | None
    """When somebody said that it is settled; null = it is open."""
    resolved_by: str
    """The name of who said so; empty = it is open."""
    may_edit: bool
    """Whether the reader may change the text: who wrote it."""
    may_delete: bool
    """Whether the reader may delete it: who wrote it, and an admin of the project."""

    @classmethod
    def of(cls, comment: Comment, request: HttpRequest) -> CommentValues:
        """A comment whose trajectory and run are loaded, for the user of a request."""
        reader, project = access(request), comment.trajectory.run.project_id
        is_own = comment.author_id is not None and comment.author_id == reader_of(request)
        return replace(
            cls.to_read(comment), may_edit=is_own and reader.may(project, Role.MEMBER),
            may_delete=reader.may(project, Role.MEMBER if is_own else Role.ADMIN),
        )

    @classmethod
    def to_read(cls, comment: Comment) -> CommentValues:
        """A comment whose trajectory is loaded, for somebody who changes nothing."""
        url = reverse("comment", args=[comment.trajectory.code, comment.code])
        return from_columns(
            cls, comment, row=comment.row_index, url=url, author=comment.author_name, may_edit=False, may_delete=False
        )

    @property
    def place(self) -> str:
        """What it is about, in words."""
        if self.row is None or self.start is None or self.stop is None:
            return "the trajectory"
        last = f"s {self.start:,}-{self.stop:,}" if self.stop > self.start + 1 else f" {self.start:,}"
        return f"row {self.row}, token{last}"


@dataclass(frozen=True)
class Discussion:
    """What people say of a trajectory, as far as the reader of a page may know it."""

    comments: list[CommentValues] | None  # In reading order. None for the visitor of a share link.
    may_comment: bool  # The reader may write one, resolve any, and mute findings.
    seen: bool | None = None
    """The reader has marked the trajectory as seen; None for the visitor of a share link, and in a part of a page."""
    muted: list[MutedValues] = field(default_factory=list)  # The rules that mute kinds of findings in its run.

    @property
    def open(self) -> list[CommentValues]:
        return [comment for comment in self.comments or [] if comment.resolved_at is None]

    @property
    def resolved(self) -> list[CommentValues]:
        return [comment for comment in self.comments or [] if comment.resolved_at is not None]


def discussion_of(request: HttpRequest, trajectory: StoredTrajectory, is_part: bool = False) -> Discussion:
    """What people say of the trajectory of a page. Three queries for a request, one for the visitor of a share link.
    ``is_part``: of a part of the page, where nobody sees whether it is marked as seen; a query less."""
    if not hasattr(request, "discussion"):
        request.discussion = _read(request, trajectory, is_part)  # type: ignore[attr-defined]
    return request.discussion  # type: ignore[attr-defined, no-any-return]


def _read(request: HttpRequest, trajectory: StoredTrajectory, is_part: bool) -> Discussion:
    muted = muted_values(request, trajectory.run)
    reader = reader_of(request)
    if reader is None:
        return Discussion(None, False, None, muted)
    stored = comments_of(trajectory)
    may_comment = access(request).may(trajectory.run.project_id, Role.MEMBER)
    is_seen_now = None if is_part else is_seen(trajectory, reader)
    return Discussion([CommentValues.of(comment, request) for comment in stored], may_comment, is_seen_now, muted)


def comment_address(comment: Comment | CommentValues, trajectory: StoredTrajectory) -> str:
    """Where a comment is read: the reader at its range, or the conversation of a trajectory without tokens."""
    page = "trajectory-record" if is_text_only(trajectory) else "trajectory"
    row = comment.row_index if isinstance(comment, Comment) else comment.row
    at = "" if row is None else f"?row={row}&t={comment.start}-{comment.stop}"
    return f"{reverse(page, args=[trajectory.code])}{at}#comment-{comment.code}"
