"""What people say of a trajectory: its comments, as the pages draw them and the twins write them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.runs.muted import MutedValues, muted_values
from inspector.trajectories.place import read_range
from inspector.trajectories.tabs import is_text_only
from inspector.web.access import access, reader_of, reads_trajectory, require, writes_trajectory
from inspector.web.twins import Page, error_page, from_columns, json_page, page, wants_json, whole_number
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Comment, Role, StoredTrajectory
from rollouts.store.trajectories.comments import (
    MAX_TEXT, Place, add_comment, comments_of, delete_comment, edit_comment, find_comment, is_seen, reopen_comment,
    resolve_comment
)


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


@dataclass(frozen=True)
class CommentsPage(Page):
    """The comments of a trajectory."""

    trajectory: str
    """The code of the trajectory."""
    comments: list[CommentValues]
    """In reading order."""


def place_of(params: QueryDict) -> Place | None:
    """The range that a form names by ``row`` and ``t``; None without ``t``. Raises :class:`Refusal`."""
    text = params.get("t", "").strip()
    if not text:
        return None
    span = read_range(text)
    if span is None:
        raise Refusal(f"“{text[:40]}” is not a range of tokens. Write it as 1204-1260, or leave it empty.", field="t")
    row = whole_number(params.get("row", "").strip() or "0")
    if row is None:
        raise Refusal(f"“{params['row'][:40]}” is not the number of a row. The first row is 0.", field="row")
    return row, *span


@never_cache
def comments(request: HttpRequest, code: str) -> HttpResponse:
    """POST writes a comment; GET at the twin lists them."""
    return (_write if request.method == "POST" else _list)(request, code=code)


@reads_trajectory
def _list(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    comments = discussion_of(request, trajectory).comments
    if comments is None:
        raise Http404("A share link shows no comments. Log in to read them.")
    address = f"{reverse('trajectory', args=[trajectory.code])}#comments"
    return json_page(CommentsPage(trajectory.code, comments)) if wants_json(request) else redirect(address)


@writes_trajectory
def _write(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    try:
        comment = add_comment(trajectory, request.user, request.POST.get("text", ""), place_of(request.POST))
    except Refusal as refusal:
        return _refused(request, trajectory, refusal, reverse("comments", args=[trajectory.code]))
    return _answer(request, trajectory, comment, 201)


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def comment(request: HttpRequest, code: str, comment: str) -> HttpResponse:
    """GET leads to the place of a comment; POST with ``do``: ``edit``, ``resolve``, ``reopen`` or ``delete``."""
    return (_change if request.method == "POST" else _go)(request, code=code, comment=comment)


def _comment(trajectory: StoredTrajectory, code: str) -> Comment:
    comment = find_comment(trajectory, code)
    if comment is None:
        raise Http404("There is no such comment on this trajectory. It may have been deleted.")
    return comment


@reads_trajectory
def _go(request: HttpRequest, trajectory: StoredTrajectory, comment: str) -> HttpResponse:
    if discussion_of(request, trajectory).comments is None:
        raise Http404("A share link shows no comments. Log in to read them.")
    return _answer(request, trajectory, _comment(trajectory, comment))


@writes_trajectory
def _change(request: HttpRequest, trajectory: StoredTrajectory, comment: str) -> HttpResponse:
    stored_comment, action = _comment(trajectory, comment), request.POST.get("do", "")
    values = CommentValues.of(stored_comment, request)
    try:
        if action == "edit":
            if not values.may_edit:
                sentence = f"Only {stored_comment.author_name} changes this text. Write a comment of your own."
                return error_page(request, 403, "This comment is not yours", sentence, run=trajectory.run.code)
            version = whole_number(request.POST.get("version")) or stored_comment.version
            edit_comment(stored_comment, request.POST.get("text", ""), version)
        elif action == "resolve":
            resolve_comment(stored_comment, request.user)
        elif action == "reopen":
            reopen_comment(stored_comment)
        elif action == "delete":
            if not values.may_delete:
                require(request, trajectory, Role.ADMIN)
            delete_comment(stored_comment)
        else:
            raise Refusal("Say what is to be done: edit, resolve, reopen or delete.", field="do")
    except Refusal as refusal:
        return _refused(request, trajectory, refusal, values.url, find_comment(trajectory, comment))
    if action == "delete":
        address = comment_address(stored_comment, trajectory).partition("#")[0] + "#comments"
        return json_page({"deleted": stored_comment.code}) if wants_json(request) else redirect(address)
    return _answer(request, trajectory, _comment(trajectory, comment))


def _answer(request: HttpRequest, trajectory: StoredTrajectory, comment: Comment, status: int = 200) -> HttpResponse:
    if wants_json(request):
        return json_page(CommentValues.of(comment, request), status)
    return redirect(comment_address(comment, trajectory))


def _refused(
    request: HttpRequest, trajectory: StoredTrajectory, refusal: Refusal, action: str, comment: Comment | None = None,
) -> HttpResponse:
    """The form again with what was typed, and why nothing was changed."""
    edited = comment if request.POST.get("do") == "edit" else None
    typed: dict[str, Any] = {name: request.POST.get(name, "") for name in ("text", "t", "row")}
    here = f"{reverse('trajectory', args=[trajectory.code])}#comments"
    back = comment_address(comment, trajectory) if comment else here
    return page(
        request, "trajectories/comment_refused.html", {"errors": {refusal.field: [str(refusal)]}}, 422,
        trajectory=trajectory, run=trajectory.run, typed=typed, refusal=refusal, action=action, back=back,
        edited=edited, has_form=not request.POST.get("do") or edited is not None, max_text=MAX_TEXT,
    )
