"""What the pages of a trajectory tell beside its tokens: its lanes, how a reply was read, a file of it, and *seen*."""

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import Path, Query, Router, Schema
from pydantic import ConfigDict

from inspector.api.answers import (
    NOT_CHANGED, Body, FileView, JobAnswer, answer, conditional, extra, file_answer, found, job_answer, the_trajectory
)
from inspector.trajectories import offline_page
from inspector.trajectories.parsers_page import audit_state
from inspector.trajectories.tokens.findings import read_findings
from inspector.trajectories.tokens.lane_tree import LaneTree, lane_tree, read_lanes
from inspector.web.access import require
from inspector.web.twins import ApiProblem, Page, json_page
from rollouts.jobs import parser_comparison
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Role, StoredTrajectory
from rollouts.store.parameters import Count, Text, YesNo
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.comments import is_seen, mark_seen

router = Router(tags=["trajectories"])
Index = Path[Count]


@dataclass(frozen=True)
class ReplyAudit(Page):
    """How the reply of a step was read."""

    trajectory: str
    """Code of the trajectory."""
    step: int
    """The step whose reply it is."""
    state: str
    """``live``, ``missing``, ``unasked``, ``queued``, ``running``, ``failed``, ``cancelled`` or ``done``."""
    why: str
    """A sentence about the state; empty when there is nothing to say."""
    job: JobAnswer | None
    """The job that reads it; null = nobody has asked for one, or what it stored is out of date."""
    audit: dict[str, Any] | None
    """What the message and each parser hold of the sampled ids, and what they lost; null until it is done."""


@dataclass(frozen=True)
class SeenMark(Page):
    """Whether the caller has looked at a trajectory. Nobody else sees it."""

    trajectory: str
    """Code of the trajectory."""
    seen: bool
    """The mark."""


class SeenAsked(Body):
    """The mark to set."""

    seen: bool = True
    """False takes it back."""


class FileAsked(Schema):
    """What the file holds; without a value every row that fits, at most 8."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    row: Count | None = None
    """That row alone."""
    finding: Count | None = None
    """That finding alone, by its number from 1, with the tokens around it."""
    view: FileView = ""
    """``tokens`` = an element per token."""
    lens: Text = ""
    """What the fill of a token shows; empty = its origin."""
    comments: YesNo = ""
    """``no`` = without the comments."""


@router.get("/trajectories/{code}/lanes", response=LaneTree, openapi_extra=extra(answers=NOT_CHANGED))
def list_lanes(request: HttpRequest, code: str) -> HttpResponseBase:
    """The lanes of a trajectory whose steps form a tree; none where they form one chain."""
    trajectory = the_trajectory(request, code)

    def build() -> HttpResponse:
        rows, steps = trajectory_parts.rows_and_steps(trajectory)
        lanes = read_lanes(trajectory, rows, steps, read_findings(trajectory, steps, rows))
        tree = lane_tree(trajectory, lanes, rows)
        return json_page(tree or LaneTree(0, "Its engine calls form no tree.", []))

    return conditional(request, trajectory, build)


@router.get("/trajectories/{code}/steps/{index}/parsers", response=ReplyAudit, openapi_extra=extra(422))
def get_parsers(request: HttpRequest, code: str, index: Index) -> HttpResponse:
    """How the reply of a step was read: what its message lost, and what every other parser reads of the same ids."""
    trajectory = _with_step(request, code, index)
    return answer(_audit(trajectory, index))


@router.post("/trajectories/{code}/steps/{index}/parsers", response={202: ReplyAudit}, openapi_extra=extra(409, 422))
def audit_parsers(request: HttpRequest, code: str, index: Index) -> HttpResponse:
    """Have a worker read the reply of a step with every parser. What it stored before is made again."""
    trajectory = _with_step(request, code, index)
    require(request, trajectory, Role.MEMBER)
    state, _, why = audit_state(trajectory, index)
    if state in ("live", "missing"):
        raise ApiProblem(409, why)
    audit, is_new = parser_comparison.ask(trajectory, index, request.user)
    if is_new and (sentence := send_job(audit.job)):
        raise ApiProblem(503, sentence)
    return answer(_audit(trajectory, index), 202)


@router.get(
    "/trajectories/{code}/file",
    openapi_extra=extra(422, answers=file_answer("One HTML file that opens without a server.", "text/html")),
)
def get_file(request: HttpRequest, code: str, asked: Query[FileAsked]) -> HttpResponse:
    """A trajectory, or one of its findings, as one HTML file that opens without a server."""
    return offline_page.file_answer(request, the_trajectory(request, code))


@router.get("/trajectories/{code}/seen", response=SeenMark, openapi_extra=extra())
def get_seen(request: HttpRequest, code: str) -> HttpResponse:
    """Whether the caller, or the maker of the API key, has marked the trajectory as seen."""
    trajectory = the_trajectory(request, code)
    return answer(SeenMark(code, is_seen(trajectory, int(request.user.pk or 0))))


@router.post("/trajectories/{code}/seen", response=SeenMark, openapi_extra=extra(409, 422))
def set_seen(request: HttpRequest, code: str, asked: SeenAsked) -> HttpResponse:
    """Mark a trajectory as seen, or as not seen; 409 while it grows. A viewer may."""
    trajectory = the_trajectory(request, code)
    try:
        mark_seen(trajectory, request.user, asked.seen)
    except ValueError as refusal:
        raise ApiProblem(409, str(refusal)) from refusal
    return answer(SeenMark(code, asked.seen))


def _with_step(request: HttpRequest, code: str, index: int) -> StoredTrajectory:
    trajectory = the_trajectory(request, code)
    found(index if index < trajectory.n_steps else None, "step", str(index))
    return trajectory


def _audit(trajectory: StoredTrajectory, index: int) -> ReplyAudit:
    state, audit, why = audit_state(trajectory, index)
    if audit is not None:
        audit.trajectory = trajectory
        audit.job.parser_audit = audit
    is_done = audit is not None and not is_active(audit.job) and state == "done"
    return ReplyAudit(
        trajectory.code, index, state, why, None if audit is None else job_answer(audit.job),
        audit.report if is_done and audit is not None else None,
    )
