"""The comments on a trajectory: listed, written, edited, resolved, reopened, deleted."""

from typing import Annotated

from django.http import HttpRequest, HttpResponse
from ninja import Router
from pydantic import Field

from inspector.api.answers import Body, answer, extra, found, the_trajectory
from inspector.trajectories.discussion import CommentsPage, CommentValues, discussion_of
from inspector.web.access import require
from inspector.web.twins import ApiProblem
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Comment, Role, StoredTrajectory
from rollouts.store.parameters import Count
from rollouts.store.trajectories.comments import (
    add_comment, delete_comment, edit_comment, find_comment, reopen_comment, resolve_comment
)

router = Router(tags=["comments"])


class CommentAsked(Body):
    """A comment to write: on the whole trajectory, or on tokens of a row."""

    text: Annotated[str, Field(max_length=1 << 16)]
    """Plain text, at most 4,000 characters; line breaks are kept."""
    row: Count | None = None
    """The row; null with ``start`` = row 0."""
    start: Count | None = None
    """The first token of the row; null = the whole trajectory."""
    stop: Count | None = None
    """The first token behind the range; null = one token."""


class EditAsked(Body):
    """Another text for a comment."""

    text: Annotated[str, Field(max_length=1 << 16)]
    """Plain text, at most 4,000 characters; line breaks are kept."""
    version: Count
    """`version` of the comment as it was read, so that nobody's edit is lost."""


@router.get("/trajectories/{code}/comments", response=CommentsPage, openapi_extra=extra())
def list_comments(request: HttpRequest, code: str) -> HttpResponse:
    """The comments on a trajectory: on all of it first, then by their place."""
    trajectory = the_trajectory(request, code)
    return answer(CommentsPage(trajectory.code, discussion_of(request, trajectory).comments or []))


@router.post("/trajectories/{code}/comments", response={201: CommentValues}, openapi_extra=extra(422))
def write_comment(request: HttpRequest, code: str, asked: CommentAsked) -> HttpResponse:
    """Write a comment, as the maker of the API key."""
    trajectory = the_trajectory(request, code)
    require(request, trajectory, Role.MEMBER)
    if asked.start is None and (asked.row is not None or asked.stop is not None):
        raise Refusal("Send start with row and stop, or none of them for the whole trajectory.", field="start")
    place = None
    if asked.start is not None:
        place = (asked.row or 0, asked.start, asked.start + 1 if asked.stop is None else asked.stop)
    try:
        stored = add_comment(trajectory, request.user, asked.text, place)
    except Refusal as refusal:
        name = {"t": "start"}.get(refusal.field, refusal.field)
        raise ApiProblem(422, str(refusal), {name: [str(refusal)]}) from refusal
    return answer(CommentValues.of(stored, request), 201)


@router.post("/trajectories/{code}/comments/{comment}/edit", response=CommentValues, openapi_extra=extra(409, 422))
def edit(request: HttpRequest, code: str, comment: str, asked: EditAsked) -> HttpResponse:
    """Give one's own comment another text; 409 where it was edited since."""
    trajectory, stored = _held(request, code, comment)
    if not CommentValues.of(stored, request).may_edit:
        raise ApiProblem(403, "Only its author edits a comment.")
    edit_comment(stored, asked.text, asked.version)
    return _again(request, trajectory, comment)


@router.post("/trajectories/{code}/comments/{comment}/resolve", response=CommentValues, openapi_extra=extra(409))
def resolve(request: HttpRequest, code: str, comment: str) -> HttpResponse:
    """Say that a comment is settled; 409 where it is already."""
    trajectory, stored = _held(request, code, comment)
    resolve_comment(stored, request.user)
    return _again(request, trajectory, comment)


@router.post("/trajectories/{code}/comments/{comment}/reopen", response=CommentValues, openapi_extra=extra(409))
def reopen(request: HttpRequest, code: str, comment: str) -> HttpResponse:
    """Say that a comment is not settled; 409 where it is open."""
    trajectory, stored = _held(request, code, comment)
    reopen_comment(stored)
    return _again(request, trajectory, comment)


@router.delete("/trajectories/{code}/comments/{comment}", response={204: None}, openapi_extra=extra())
def delete(request: HttpRequest, code: str, comment: str) -> HttpResponse:
    """Delete a comment: one's own, or as an admin of the project any."""
    trajectory, stored = _held(request, code, comment)
    if not CommentValues.of(stored, request).may_delete:
        require(request, trajectory, Role.ADMIN)
    delete_comment(stored)
    return HttpResponse(status=204)


def _held(request: HttpRequest, code: str, comment: str) -> tuple[StoredTrajectory, Comment]:
    """The comment, for a member. Raises :class:`ApiProblem`."""
    trajectory = the_trajectory(request, code)
    require(request, trajectory, Role.MEMBER)
    return trajectory, found(find_comment(trajectory, comment), "comment", comment)


def _again(request: HttpRequest, trajectory: StoredTrajectory, comment: str) -> HttpResponse:
    return answer(CommentValues.of(found(find_comment(trajectory, comment), "comment", comment), request))
