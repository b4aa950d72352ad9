"""`/trajectories/CODE/comments`: write a comment; `.../comments/COMMENT`: go to it, edit, resolve, delete it."""

from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.trajectories.discussion import CommentValues, comment_address, discussion_of
from inspector.trajectories.place import read_range
from inspector.web.access import reads_trajectory, require, writes_trajectory
from inspector.web.twins import Page, error_page, json_page, page, wants_json, whole_number
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Comment, Role, StoredTrajectory
from rollouts.store.trajectories.comments import (
    MAX_TEXT, Place, add_comment, delete_comment, edit_comment, find_comment, reopen_comment, resolve_comment
)


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
    if wants_json(request):
        return json_page(CommentsPage(trajectory.code, comments))
    return redirect(f"{reverse('trajectory', args=[trajectory.code])}#comments")


@writes_trajectory
def _write(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    try:
        comment = add_comment(trajectory, request.user, request.POST.get("text", ""), place_of(request.POST))
    except Refusal as refusal:
        return _refused(request, trajectory, refusal, reverse("comments", args=[trajectory.code]))
    if wants_json(request):
        return json_page(CommentValues.of(comment, request), 201)
    return redirect(comment_address(comment, trajectory))


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
    stored_comment = _comment(trajectory, comment)
    if wants_json(request):
        return json_page(CommentValues.of(stored_comment, request))
    return redirect(comment_address(stored_comment, trajectory))


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
        if wants_json(request):
            return json_page({"deleted": stored_comment.code})
        return redirect(comment_address(stored_comment, trajectory).partition("#")[0] + "#comments")
    if wants_json(request):
        return json_page(CommentValues.of(_comment(trajectory, comment), request))
    return redirect(comment_address(stored_comment, trajectory))


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
