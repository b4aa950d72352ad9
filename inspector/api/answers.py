"""How the API answers: JSON as the twins write it, 304 for what has not changed, 404 for what is not there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Generic, TypeVar

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from ninja import Schema
from pydantic import AfterValidator, ConfigDict, Field

from inspector.runs.jobs.job_values import JobValues
from inspector.runs.run_values import ListedRun, RunValues, ShownRun
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.trajectories.frame import fingerprint
from inspector.trajectories.tokens.findings import FindingValues
from inspector.trajectories.views import PAGE_VERSION
from inspector.web.access import access, require
from inspector.web.twins import MEDIA_TYPE, ApiProblem, Page, from_columns, json_page, some_fields
from rollout_inspector.refusal import Remedy, Words
from rollouts.jobs.exports.exports import is_offered
from rollouts.jobs.opened import fill
from rollouts.store.jobs.jobs import JOB_KINDS, is_active
from rollouts.store.models import Job, Role, Run, StoredTrajectory, TemplateCheck
from rollouts.store.paging import ListPart
from rollouts.store.parameters import Text, among, listed, storable
from rollouts.store.people.visible_objects import find_visible_check, find_visible_run, find_visible_trajectory
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

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


Schema.model_config["defer_build"] = True
"""The model of each operation is built when it is first called: all of them take a second of every start."""


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
    def of(cls, part: ListPart[U], line: Callable[[U], T]) -> AnswerPart[T]:
        """The lines of a part of the store."""
        items, following = part
        return cls([line(item) for item in items], following)


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


def answer(value: Any, status: int = 200) -> HttpResponse:
    """A value as JSON that nobody keeps."""
    json = json_page(value, status)
    json["Cache-Control"] = "private, no-store"
    return json


WORDS: Words = {
    Remedy.LEAVE_OUT: "Leave such trajectories out with `leave_out`, or write them all the same with `force`.",
    Remedy.OTHER_STRATEGY: "Name another `strategy`, or leave such trajectories out with `leave_out`.",
    Remedy.CHOOSE_TOKENIZER: "POST /api/v1/runs/CODE/diagnose with a `tokenizer` gives it one.",
    Remedy.REPLAY_BY_COMMAND: "On a command line there is no limit: manage.py replay, with the code of the trajectory.",
    Remedy.OWN_FORMAT: "Ask for the `format` own_jsonl, which holds all of them.",
    Remedy.ADOPT_FILES: "If that database is no longer used, run `manage.py doctor --adopt-files` on the server.",
}


COLUMNS = " ".join(field.name for field in fields(RunValues))
RunOfProject: Any = some_fields(
    ListedRun, "RunOfProject", "A run as a line of a list.", f"{COLUMNS} project=project_code"
)
WholeRun: Any = some_fields(
    ShownRun, "WholeRun", "A run with its origin.",
    f"{COLUMNS} project=project_code tokenizer chat_template rows_chat_template seed_note tool_calls_note created_by "
    "lacks settings",
)
JobAnswer: Any = some_fields(
    JobValues, "JobValues", "Background work.",
    "code kind what status active run trajectory check done total error sentence notes file bytes created_at "
    "finished_at expires_at",
)


def run_line(run: Run) -> Any:
    """A run whose project is loaded."""
    return RunOfProject.of(ListedRun.of(run, project_code=run.project.code))


def whole_run(run: Run) -> Any:
    """A run whose project, tokenizer and templates are loaded."""
    return WholeRun.of(ShownRun.of(run, project=None, project_code=run.project.code))


def job_answer(job: Job) -> Any:
    """A job whose subject is loaded."""
    return JobAnswer.of(JobValues.with_subject(
        job, WORDS, run=job.run.code if job.run else None,
        trajectory=job.subject.code if isinstance(job.subject, StoredTrajectory) else None,
        check=job.template_check.code if job.template_check else None,
        file=reverse("api:job_file", kwargs={"code": job.code}) if is_offered(job) else None,
    ))


TrajectoryAnswer: Any = some_fields(
    TrajectoryValues, "TrajectoryValues", "A trajectory.",
    "code url run index external_id group status error stop_reason reward reward_parts tokenizer seed training_step "
    "steps rows rows_per_call tokens sampled trained lost findings worst_severity checks created_at finished_at",
)
TrajectoryLine: Any = some_fields(
    TrajectoryValues, "TrajectoryLine", "A trajectory as a line of its run's list.",
    "code url index external_id group group_url status error stop_reason prompt_line answer_line reward reward_parts "
    "training_step steps rows rows_per_call tokens sampled trained findings worst_severity kinds not_checked comments "
    "open_comments seen zero_variance",
)
FoundTrajectory: Any = some_fields(
    TrajectoryValues, "FoundTrajectory", "A trajectory that a search found.",
    "code url run run_name external_id group status",
)
StepValues: Any = some_fields(
    StepSummary, "StepValues", "An engine call, without its tokens.",
    "index row parent shared_length parent_length breaks prompt_length completion_length finish_reason stop_reason "
    "logprobs_mode temperature top_p top_k engine policy_version",
)


@dataclass(frozen=True)
class WholeStep(Page):
    """An engine call with what the source recorded beside its tokens."""

    step: StepValues
    """Its figures."""
    recorded: dict[str, Any]
    """Messages that are new at this step, tools, kwargs, reply, text and other fields; only those that are filled."""


@dataclass(frozen=True)
class RowValues(Page):
    """A training row, without its tokens."""

    index: int
    """Its position in its trajectory."""
    n_tokens: int
    """Its length."""
    n_trained: int
    """Tokens under the gradient."""
    follows_steps: bool
    """It is the stream of its last step; otherwise a trainer or a strategy wrote it."""
    steps: list[int]
    """The steps that it trains."""
    columns: list[str]
    """Names of the columns that a trainer wrote for it, or that engines told beside its tokens."""
    is_stored: bool
    """False: the row that the steps of an unfinished trajectory make so far."""

    @classmethod
    def of(cls, row: RowSummary, columns: dict[int, list[str]]) -> RowValues:
        """A row, and the names of the columns of each row."""
        names, is_stored = columns.get(row.index, []), row.key is not None
        return from_columns(cls, row, steps=sorted(row.steps), columns=names, is_stored=is_stored)


@dataclass(frozen=True)
class TokenColumns(Page):
    """Tokens ``[start, stop)`` of a row or of the stream of a step; each list has ``stop - start`` values."""

    trajectory: str
    """Code of the trajectory."""
    start: int
    """Offset of the first token."""
    stop: int
    """Offset behind the last token; less than what was asked for where the answer would be too large."""
    n_tokens: int
    """Tokens of the whole row or stream."""
    next: int | None
    """What ``start`` takes for the following window; null at the end."""
    ids: list[int] | None
    """Token ids; null = not asked for, as for each list."""
    loss_mask: list[bool] | None
    """True = this token is under the gradient."""
    logprobs: list[float | None] | None
    """Sampling log-probability; null for a token that was not sampled, or was recorded without one."""
    origin: list[str] | None
    """``prompt``, ``sampled``, ``template``, ``observation`` or ``inserted``."""
    step: list[int | None] | None
    """The step that read or sampled the token; null = not known."""
    columns: dict[str, list[float | None]]
    """Name of a trainer's column, or of one that an engine told -> its values; null where the column has none."""


@dataclass(frozen=True)
class WholeFinding(Page):
    """A finding with its tokens."""

    finding: FindingValues
    """The finding."""
    expected_ids: list[int]
    """Token ids that should stand there."""
    actual_ids: list[int]
    """Token ids that stand there."""
