"""How the API answers: JSON as the twins write it, 304 for what has not changed, 404 for what is not there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.utils.cache import get_conditional_response, patch_vary_headers
from ninja import Schema
from pydantic import AfterValidator, ConfigDict, Field

from inspector.trajectories.frame import fingerprint
from inspector.trajectories.views import PAGE_VERSION
from inspector.web.access import access, require
from inspector.web.problems import MEDIA_TYPE, ApiProblem
from inspector.web.twins import Page, json_page
from rollouts.jobs.opened import fill
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.jobs import JOB_KINDS
from rollouts.store.models import Role, Run, StoredTrajectory, TemplateCheck
from rollouts.store.paging import CursorPart
from rollouts.store.parameters import Text, among, listed, storable
from rollouts.store.people.visible_objects import find_visible_check, find_visible_run, find_visible_trajectory

MEANINGS = {
    400: "The request cannot be read.",
    401: "No login and no valid API key.",
    403: "The token lacks the scope, or the role is too low.",
    404: "There is no such thing in the projects of the caller.",
    405: "This address does not take this method.",
    409: "The state of the thing does not allow it.",
    410: "It was here, and is gone.",
    411: "The request does not say how long it is.",
    413: "The request is too large.",
    415: "The content type is not read.",
    422: "A value makes no sense; `errors` names it.",
    429: "Too many requests; `Retry-After` says when to try again.",
    503: "Busy, or Redis does not answer; try again.",
    507: "The disk of the server is full.",
}
EVERYWHERE = (400, 401, 403, 404, 429, 503, 507)  # What any operation may answer.
PROBLEM_SCHEMA = {"$ref": "#/components/schemas/ProblemDocument"}
NOT_CHANGED = {304: {"description": "What `If-None-Match` names is still right."}}


def problems(*statuses: int) -> dict[int, Any]:
    """The documentation of refusals by status."""
    return {
        status: {"description": MEANINGS[status], "content": {MEDIA_TYPE: {"schema": PROBLEM_SCHEMA}}}
        for status in statuses
    }


def extra(*statuses: int, answers: Mapping[int, Any] | None = None, **more: Any) -> dict[str, Any]:
    """``openapi_extra`` of an operation that may also answer ``statuses`` and ``answers``."""
    return {"responses": {**problems(*EVERYWHERE, *statuses), **(answers or {})}, **more}


def file_answer(description: str, *media_types: str) -> dict[int, Any]:
    """The documentation of an answer that is a file."""
    text, data = {"type": "string"}, {"type": "string", "format": "binary"}
    content = {name: {"schema": text if name.startswith("text/") else data} for name in media_types}
    return {200: {"description": description, "content": content}}


LongText = Annotated[str, Field(max_length=1 << 20), AfterValidator(storable)]
Limit = Annotated[int, Field(ge=1, le=500, description="The most items of one answer.")]
Cursor = Annotated[Text, Field(description="`next` of the part before; empty for the first part.")]
FILE_VIEWS = ("runs", "tokens")
RunKind = Annotated[str, among(Run.Kind.values), listed(Run.Kind.values)]
JobKind = Annotated[str, among(JOB_KINDS), listed(JOB_KINDS)]
FileView = Annotated[str, among(FILE_VIEWS), listed(FILE_VIEWS)]


class Body(Schema):
    """A JSON object whose unknown keys are refused, so that a misspelt one is seen."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PartAsked(Schema):
    """Which part of a list."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    cursor: Cursor = ""
    limit: Limit = 50


T = TypeVar("T")
U = TypeVar("U")


def found(target: T | None, noun: str, code: str) -> T:
    """The target that a selector found. Raises :class:`ApiProblem` 404, the same for a hidden and an unknown one."""
    if target is None:
        raise ApiProblem(404, f"There is no {noun} {code[:64]!r} here. It may have been deleted, or the code is cut.")
    return target


def the_run(request: HttpRequest, code: str) -> Run:
    """A run that the caller may see, with its project, tokenizer and maker. One query. Raises :class:`ApiProblem`."""
    return found(find_visible_run(access(request), code), "run", code)


def members_run(request: HttpRequest, code: str) -> Run:
    """A run that the caller may change. Raises :class:`ApiProblem`."""
    run = the_run(request, code)
    require(request, run, Role.MEMBER)
    return run


def resting_run(request: HttpRequest, code: str) -> Run:
    """A run that the caller may change, and that has ended. Raises :class:`ApiProblem`, 409 for one that works."""
    run = members_run(request, code)
    if is_active(run):
        raise ApiProblem(409, "This run still works. Wait until it has ended, or cancel it first.")
    return run


def the_trajectory(request: HttpRequest, code: str) -> StoredTrajectory:
    """A trajectory that the caller may see, with its run. One query. Raises :class:`ApiProblem`."""
    trajectory = found(find_visible_trajectory(access(request), code), "trajectory", code)
    fill(trajectory)
    return trajectory


def the_check(request: HttpRequest, code: str) -> TemplateCheck:
    """A template check that the caller may see, with its job. One query. Raises :class:`ApiProblem`."""
    return found(find_visible_check(access(request), code), "template check", code)


@dataclass(frozen=True)
class AnswerItems(Page, Generic[T]):
    """A list that is answered at once."""

    items: list[T]
    """In their order."""


@dataclass(frozen=True)
class AnswerPart(Page, Generic[T]):
    """Part of a list."""

    items: list[T]
    """In the order of the list."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""

    @classmethod
    def of(cls, part: CursorPart[U], line: Callable[[U], T]) -> AnswerPart[T]:
        """The lines of a part of the store."""
        return cls([line(item) for item in part.items], part.next or None)


def conditional(
    request: HttpRequest, trajectory: StoredTrajectory, build: Callable[[], HttpResponseBase], also: Sequence[str] = ()
) -> HttpResponseBase:
    """The answer about a trajectory. One that has ended has an ETag, and 304 is answered before anything is read.

    ``also``: what else the answer depends on.
    """
    run = trajectory.run
    if is_active(trajectory):
        return fresh(build())
    parts = (
        PAGE_VERSION, trajectory.pk, run.project_id, fingerprint(trajectory), trajectory.worst_severity,
        trajectory.checks, run.diagnosis_version, sorted(run.finding_counts.items()), run.tokenizer_id,
        run.chat_template_id, request.get_full_path(), request.headers.get("Accept", ""), also,
    )
    return with_etag(request, parts, build)


def with_etag(request: HttpRequest, parts: Any, build: Callable[[], HttpResponseBase]) -> HttpResponseBase:
    """The answer with an ETag of ``parts``, or 304 where the caller has it."""
    etag = f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'
    answer: HttpResponseBase = get_conditional_response(request, etag=etag) or build()
    if answer.status_code == 200:
        answer["ETag"] = etag
    # The caller asks each time, because access may be revoked.
    answer["Cache-Control"] = "private, no-cache"
    patch_vary_headers(answer, ["Authorization", "Cookie", "Accept"])
    return answer


def fresh(answer: HttpResponseBase) -> HttpResponseBase:
    """An answer that still changes: nobody keeps it."""
    answer["Cache-Control"] = "private, no-store"
    return answer


def answer(value: Page | Mapping[str, Any], status: int = 200) -> HttpResponse:
    """A value as JSON that nobody keeps."""
    json = json_page(value, status)
    json["Cache-Control"] = "private, no-store"
    return json
