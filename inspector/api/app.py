"""The API: its operations, its schema, and the one way in which it refuses."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, HttpError, Throttled, ValidationError
from ninja.parser import Parser
from pydantic import TypeAdapter

from inspector.api import checks, comments, jobs, muted, reading, runs, search, training, trajectories
from inspector.api.answers import WORDS
from inspector.api.callers import ApiTokenAuth, CallerThrottle, SessionAuth
from inspector.runs.compare_page import ComparedRun, KindInRuns, KindOfRun, QuestionInRuns
from inspector.runs.training.columns_page import ColumnLine
from inspector.runs.training.overlay import OverlaidChart, Overlay
from inspector.web.twins import ApiProblem, Page, ProblemDocument, field_docs, problem
from rollout_inspector.diagnose.checks import CheckTotal
from rollout_inspector.formats.limits import memory_of
from rollout_inspector.refusal import Refusal, worded
from rollout_inspector.streams.lanes import LeavingPlace, Summary
from rollouts.jobs.launch import LaunchRefused
from rollouts.jobs.pushes import Pushed
from rollouts.store.runs.forks import BreakEffect, ForkBranch, ForkFigures, ForkSample, PairedDifference
from rollouts.store.runs.policy_versions import PolicyVersionLine
from rollouts.store.runs.run_summary import RewardBin, RunSummary
from rollouts.store.runs.training_steps import TrainingStepLine
from rollouts.store.trajectories.comments import CommentMoved

MAX_BODY_BYTES = 4 << 20  # The largest JSON body.
MAX_BODY_MEMORY = 32 << 20  # Bytes of memory that the values of a body take.


class BoundedParser(Parser):
    """Reads a JSON body of bounded size. Its depth and its numbers are those of any JSON that can be stored."""

    def parse_body(self, request: HttpRequest) -> Any:
        if len(request.body) > MAX_BODY_BYTES or memory_of(request.body) > MAX_BODY_MEMORY:
            raise ApiProblem(413, f"A JSON body has at most {MAX_BODY_BYTES >> 20} MB. Send files to /api/v1/imports.")
        return msgspec.json.decode(request.body)


OTHERS = (
    RunSummary, RewardBin, CheckTotal, ProblemDocument, BreakEffect, ForkBranch, ForkFigures, ForkSample,
    PairedDifference, jobs.SettingsAsked, jobs.ForkSettingsAsked, ColumnLine, ComparedRun, KindInRuns, KindOfRun,
    QuestionInRuns, Overlay, OverlaidChart, LeavingPlace, Summary, Pushed, PolicyVersionLine, TrainingStepLine,
)
"""Dataclasses in answers and requests that are no page of ours, and know nothing of a schema."""


class DocumentedAPI(NinjaAPI):
    """The library's API. Its schema also has the problem document, and the docstrings of inherited fields."""

    def get_openapi_operation_id(self, operation: Any) -> str:
        """The name of the function: generated clients call the operation so."""
        return str(operation.view_func.__name__)

    def get_openapi_schema(self, **kwargs: Any) -> Any:
        schema = super().get_openapi_schema(**kwargs)
        components = schema["components"]["schemas"]
        components["ProblemDocument"] = TypeAdapter(ProblemDocument).json_schema()
        for name, component in components.items():
            component["title"] = name  # what generated clients call a model; each list alone is an `AnswerPart`
        for page in (*_pages(), *OTHERS):
            # The library reads the docstrings of a class, and not those of the classes that it extends.
            properties = components.get(page.__name__, {}).get("properties", {})
            texts = field_docs(page) if properties else {}
            for field, description in properties.items():
                if "description" not in description and field in texts:
                    description["description"] = texts[field]
        return schema


def _pages(base: type[Page] = Page) -> Iterator[type[Page]]:
    for page in base.__subclasses__():
        yield page
        yield from _pages(page)


api = DocumentedAPI(
    title="Rollout Inspector",
    version="1",
    description=(
        "Runs, trajectories, token columns, findings and template checks as JSON; token columns as Arrow streams too. "
        "Lists are read part by part: `next` of an answer is the `cursor` of the following request. "
        "Every refusal is a problem document (RFC 9457) whose `detail` says what to do."
    ),
    urls_namespace="api",
    docs_url=None,
    openapi_url=None,
    auth=[ApiTokenAuth(), SessionAuth()],
    throttle=[CallerThrottle()],
    parser=BoundedParser(),
)
for module in (runs, training, trajectories, reading, comments, muted, checks, jobs, search):
    api.add_router("", module.router)


@cache
def schema() -> bytes:
    """The OpenAPI document (3.1), written once by the library."""
    return msgspec.json.encode(api.get_openapi_schema(path_prefix="/api/v1/"))


@api.exception_handler(ApiProblem)
def _refused(request: HttpRequest, error: ApiProblem) -> HttpResponse:
    return problem(error.status, error.sentence, error.errors)


@api.exception_handler(Refusal)
def _not_done(request: HttpRequest, refusal: Refusal) -> HttpResponse:
    sentence = worded(str(refusal), refusal.remedy, WORDS)
    return problem(422, sentence, {refusal.field: [sentence]} if refusal.field else None)


@api.exception_handler(LaunchRefused)
def _not_launched(request: HttpRequest, refusal: LaunchRefused) -> HttpResponse:
    return problem(422, str(refusal), {f"settings.{name}": [text] for name, text in refusal.problems.items()})


@api.exception_handler(CommentMoved)
def _moved(request: HttpRequest, refusal: CommentMoved) -> HttpResponse:
    return problem(409, str(refusal), {"text": [str(refusal)]} if refusal.field == "text" else None)


@api.exception_handler(Http404)
def _missing(request: HttpRequest, error: Http404) -> HttpResponse:
    return problem(404, str(error) or "There is no such thing here.")


@api.exception_handler(PermissionDenied)
def _denied(request: HttpRequest, error: PermissionDenied) -> HttpResponse:
    return problem(403, str(error) or "Your role does not allow this.")


@api.exception_handler(HttpError)
def _http_error(request: HttpRequest, error: HttpError) -> HttpResponse:
    if isinstance(cause := error.__cause__, ApiProblem):
        return problem(cause.status, cause.sentence, cause.errors)
    if isinstance(error, AuthenticationError):
        return problem(401, "Log in, or send an API key as `Authorization: Bearer TOKEN`; the page /tokens makes one.")
    if isinstance(error, Throttled):
        return problem(429, "These are too many requests. `Retry-After` says after how many seconds to go on.")
    if error.status_code == 400:
        return problem(400, "The body cannot be read: send JSON of bounded depth, in UTF-8.")
    return problem(error.status_code, str(error))


@api.exception_handler(ValidationError)
def _invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
    """422 with the name of each value that makes no sense."""
    errors: dict[str, list[str]] = {}
    for fault in error.errors:
        place, *path = fault["loc"]
        # The library puts the name of the parameter between the kind of place and the field.
        name = ".".join(str(step) for step in path if step != "asked") or str(place)
        errors.setdefault(name[:100], []).append(str(fault["msg"]).removeprefix("Value error, "))
    name, sentences = next(iter(errors.items()))
    return problem(422, f"{name}: {sentences[0]}.".replace("..", "."), errors)
