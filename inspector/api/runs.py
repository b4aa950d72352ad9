"""Runs: listed, read, cancelled, resumed, deleted; their figures, trajectories and findings."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema
from pydantic import ConfigDict, Field

from inspector.api import push_views as push
from inspector.api.answers import (
    AnswerPart, FindingValues, JobAnswer, PartAsked, RunKind, RunOfProject, TrajectoryLine, WholeRun, answer, extra,
    fresh, job_answer, members_run, run_line, the_run, whole_run
)
from inspector.api.tokens import ARROW_ANSWER, lines_as_arrow, wants_arrow
from inspector.runs.cached_figures import summary_of
from inspector.runs.compare_page import MAX_RUNS, RunComparison, compared
from inspector.runs.filters import ListQuery
from inspector.runs.live_parts import list_part
from inspector.web.access import access, may_delete, reader_of, too_low
from inspector.web.twins import ApiProblem, problem
from rollout_inspector.refusal import Refusal
from rollouts.jobs import run_actions
from rollouts.jobs.pushes import Pushed
from rollouts.store.models import Role
from rollouts.store.parameters import Count, KindName, SeverityName, SortName, StatusName, Text
from rollouts.store.people.visible_objects import findings_of_run, visible_jobs
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.run_summary import RunSummary
from rollouts.store.runs.runs import RunFilters, visible_runs
from rollouts.store.trajectories import trajectory_list
from rollouts.store.trajectories.trajectory_list import is_cursor
from rollouts.store.trajectories.trajectory_parts import finding_numbers
from rollouts.store.trajectory_filters import FilterParameters

router = Router(tags=["runs"])

TOKEN_ALONE: dict[str, Any] = {"security": [{"ApiTokenAuth": []}]}
RUN_BODY = {"content": {"application/json": {"schema": push.RunDescription.model_json_schema()}}}
LINES = {"schema": {"type": "string", "description": "JSON Lines of any import format, plain, gzip or zstd."}}
BYTES = {"schema": {"type": "string", "format": "binary", "description": "A whole file of any import format."}}
LINES_BODY = {
    "required": True,
    "content": {"application/octet-stream": BYTES, "application/x-ndjson": LINES, "text/plain": LINES},
}
"""What a push reads as it arrives, so that the library sees no body."""


class RunsAsked(PartAsked):
    """Which runs are listed."""

    text: Text = ""
    """A part of the name or of the model, or a whole code."""
    status: StatusName = ""
    """Only runs in this state."""
    kind: RunKind = ""
    """Only launches, or only imports."""
    project: Text = ""
    """Code of a project."""


class TrajectoriesAsked(PartAsked, FilterParameters):
    """Which trajectories of a run are listed, and in which order."""

    sort: SortName = "index"
    """A minus sign means descending."""

    def as_query(self, reader: int | None) -> ListQuery:
        """The filter of the run's page with the same values. ``reader``: the key of the user who asks."""
        values = self.model_dump(include=set(FilterParameters.model_fields))
        return ListQuery(**values, reader=reader if self.seen else None, sort=self.sort or "index", after=self.cursor)


class FindingsAsked(PartAsked):
    """Which findings are listed."""

    kind: KindName = ""
    """Only findings of this kind."""
    severity: SeverityName = ""
    """Only findings of this severity."""


class ComparisonAsked(Schema):
    """Which runs are compared, and over which training steps."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    run: list[Text] = Field(min_length=2, max_length=MAX_RUNS)
    """Codes of runs, in the order of the answer."""
    training_min: Count | None = None
    """The first training step of the charts."""
    training_max: Count | None = None
    """The last training step of the charts."""


@router.get("/runs", response=AnswerPart[RunOfProject], openapi_extra=extra(422))
def list_runs(request: HttpRequest, asked: Query[RunsAsked]) -> HttpResponse:
    """The runs of the caller's projects, newest first."""
    filters = RunFilters(asked.text, asked.status, asked.kind, asked.project)
    return answer(AnswerPart.of(visible_runs(access(request), filters, asked.cursor, asked.limit), run_line))


@router.post(
    "/runs", auth=None, throttle=[], response={201: push.RunToPush},
    openapi_extra={**extra(411, 413, 415, requestBody=RUN_BODY), **TOKEN_ALONE},
)
def create_run(request: HttpRequest) -> HttpResponse:
    """Make an empty run to push to. The token needs the scope ``push``."""
    return answer(push.make_run(request), 201)


@router.get("/runs/{code}", response=WholeRun, openapi_extra=extra())
def get_run(request: HttpRequest, code: str) -> HttpResponse:
    """One run with its origin and totals."""
    return answer(whole_run(the_run(request, code)))


@router.delete("/runs/{code}", response={204: None}, openapi_extra=extra())
def delete_run(request: HttpRequest, code: str) -> HttpResponse:
    """Remove a run with everything in it; a run that still works is cancelled first.

    A member deletes what they made; an admin of the project deletes every run of it.
    """
    run = the_run(request, code)
    if not may_delete(request, run):
        raise too_low(run.project, access(request).role_in(run.project_id) or Role.VIEWER, Role.ADMIN)
    run_actions.delete(run)
    return HttpResponse(status=204)


@router.post("/runs/{code}/cancel", response=WholeRun, openapi_extra=extra())
def cancel_run(request: HttpRequest, code: str) -> HttpResponse:
    """Ask a run to stop. One that has ended stays as it is."""
    run = members_run(request, code)
    run_actions.cancel(run)
    return answer(whole_run(run))


@router.post("/runs/{code}/resume", response=WholeRun, openapi_extra=extra(409))
def resume_run(request: HttpRequest, code: str) -> HttpResponse:
    """Go on with a run that stopped before its end. What is stored is neither sampled nor read again."""
    run = members_run(request, code)
    try:
        run_actions.resume(run)
    except ValueError as refusal:
        raise ApiProblem(409, str(refusal)) from refusal
    return answer(whole_run(run))


@router.get("/runs/{code}/summary", response=RunSummary, openapi_extra=extra())
def get_summary(request: HttpRequest, code: str) -> HttpResponse:
    """Counts, rewards, stop reasons, findings by kind and checks of a run."""
    return answer(summary_of(the_run(request, code)))


@router.get(
    "/runs/{code}/trajectories", response=AnswerPart[TrajectoryLine], openapi_extra=extra(422, answers=ARROW_ANSWER)
)
def list_trajectories(request: HttpRequest, code: str, asked: Query[TrajectoriesAsked]) -> HttpResponse:
    """The trajectories of a run, with the filters and orders of its page.

    JSON, or with `Accept: application/vnd.apache.arrow.stream` an Arrow IPC stream, whose metadata has `next`.
    """
    run, query = the_run(request, code), asked.as_query(reader_of(request))
    if query.after and not is_cursor(query.after, query.sort):
        raise Refusal(
            "This cursor belongs to another order. Send `next` of the part before, or leave the cursor out.",
            field="cursor",
        )
    part = trajectory_list.list_trajectories(run, query, query.sort, query.after, asked.limit)
    lines = list_part(run, query, part, reader_of(request))
    values = [TrajectoryLine.of(line) for line in lines["trajectories"]]
    if wants_arrow(request):
        return fresh(lines_as_arrow(values, lines["next"]))  # type: ignore[return-value]
    return answer(AnswerPart(values, lines["next"]))


@router.post(
    "/runs/{code}/trajectories", auth=None, throttle=[], response={200: Pushed},
    openapi_extra={**extra(409, 411, 413, 415, requestBody=LINES_BODY), **TOKEN_ALONE},
)
def push_trajectories(request: HttpRequest, code: str) -> HttpResponse:
    """Push trajectories to a run, as docs/push.md says. The token needs the scope ``push``."""
    status, body = push.take_lines(request, code)
    if status < 400:
        return answer(body)
    sentence = body.pop("error", "Nothing was stored: every line was rejected. `rejected` says why.")
    return problem(status, sentence, **body)


@router.get("/runs/{code}/findings", response=AnswerPart[FindingValues], openapi_extra=extra(422))
def list_findings_of_run(request: HttpRequest, code: str, asked: Query[FindingsAsked]) -> HttpResponse:
    """The findings of a run, in the order of storing."""
    run = the_run(request, code)
    muted = muted_in(run)
    part = findings_of_run(run, {"kind": asked.kind, "severity": asked.severity}, asked.cursor, asked.limit)
    numbers = finding_numbers(part[0])
    return answer(AnswerPart.of(
        part, lambda finding: FindingValues.of(finding, finding.trajectory.code, numbers[finding.pk], muted)
    ))


@router.get("/compare", response=RunComparison, openapi_extra=extra(422))
def compare_runs(request: HttpRequest, asked: Query[ComparisonAsked]) -> HttpResponse:
    """Two to six runs side by side: figures, findings, settings, questions, and charts over training steps."""
    runs = [the_run(request, code) for code in asked.run]
    return answer(compared(runs, asked.training_min, asked.training_max))


@router.get("/runs/{code}/jobs", response=AnswerPart[JobAnswer], openapi_extra=extra(422))
def list_jobs_of_run(request: HttpRequest, code: str, asked: Query[PartAsked]) -> HttpResponse:
    """The background work of a run, newest first."""
    run = the_run(request, code)
    columns = {"run__code": run.code}
    return answer(AnswerPart.of(visible_jobs(access(request), columns, asked.cursor, asked.limit), job_answer))
