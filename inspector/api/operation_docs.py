"""What the schema says of an operation beside its parameters: its answers, its errors and its kinds of content."""

from collections.abc import Mapping
from typing import Annotated, Any

from ninja import Schema
from pydantic import AfterValidator, ConfigDict, Field

from inspector.web.problems import MEDIA_TYPE
from rollouts.store.jobs.jobs import JOB_KINDS
from rollouts.store.models import Run
from rollouts.store.parameters import Text, among, listed, storable

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
