"""One trajectory: its steps, its findings, its rows as stored, and its rows as every strategy makes them."""

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from ninja import Path, Query, Router

from inspector.api.answers import (
    NOT_CHANGED, AnswerItems, AnswerPart, FindingValues, JobAnswer, PartAsked, RowValues, StepValues, TokenColumns,
    TrajectoryAnswer, WholeFinding, WholeStep, answer, conditional, extra, found, job_answer, the_trajectory
)
from inspector.api.tokens import ARROW_ANSWER, TokensAsked, columns_answer, of_row, of_step, of_window
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.trajectories.record_page import recorded_step
from inspector.web.access import require
from inspector.web.twins import ApiProblem, Page, json_page
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.broker import send_job
from rollouts.jobs.replays import trajectory_replays
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Replay, ReplayRows, Role, StoredTrajectory
from rollouts.store.paging import cut_part, read_cursor
from rollouts.store.parameters import Count
from rollouts.store.runs.muted import muted_in
from rollouts.store.trajectories import engine_columns, trajectory_parts
from rollouts.store.trajectories.replays import stored_rows

router = Router(tags=["trajectories"])
KEPT: dict[str, Any] = extra(422, answers=NOT_CHANGED)
TOKENS: dict[str, Any] = extra(422, answers={**NOT_CHANGED, **ARROW_ANSWER})
Index = Path[Count]


class FindingsOfTrajectoryAsked(PartAsked):
    """Which part of the findings, in reading order."""


@dataclass(frozen=True)
class ReplayValues(Page):
    """What every strategy makes of a trajectory."""

    trajectory: str
    """Code of the trajectory."""
    job: JobAnswer
    """The job that replays it."""
    strategies: list[dict[str, Any]]
    """The figures of each strategy; empty until the job is done."""


@router.get("/trajectories/{code}", response=TrajectoryAnswer, openapi_extra=KEPT)
def get_trajectory(request: HttpRequest, code: str) -> HttpResponseBase:
    """One trajectory, without its tokens."""
    trajectory = the_trajectory(request, code)
    run = trajectory.run
    values = TrajectoryValues.of(trajectory, run, tokenizer=run.tokenizer.name if run.tokenizer else None)
    return conditional(request, trajectory, lambda: json_page(TrajectoryAnswer.of(values)))


@router.get("/trajectories/{code}/steps", response=AnswerPart[StepValues], openapi_extra=KEPT)
def list_steps(request: HttpRequest, code: str, asked: Query[PartAsked]) -> HttpResponseBase:
    """The engine calls of a trajectory, in their order, without tokens."""
    trajectory = the_trajectory(request, code)
    first = _position("steps", asked.cursor)

    def build() -> HttpResponseBase:
        steps = trajectory_parts.read_steps(trajectory, first, asked.limit + 1)
        part = cut_part("steps", steps, asked.limit, lambda step: (step.index + 1,))
        return json_page(AnswerPart.of(part, StepValues.of))

    return conditional(request, trajectory, build)


@router.get("/trajectories/{code}/steps/{index}", response=WholeStep, openapi_extra=KEPT)
def get_step(request: HttpRequest, code: str, index: Index) -> HttpResponseBase:
    """One engine call with its new messages, tools, reply and other recorded fields."""
    trajectory = the_trajectory(request, code)
    step = _one_step(trajectory, index)
    return conditional(request, trajectory, lambda: json_page(WholeStep(step, recorded_step(trajectory, index))))


@router.get("/trajectories/{code}/steps/{index}/tokens", response=TokenColumns, openapi_extra=TOKENS)
def get_step_tokens(request: HttpRequest, code: str, index: Index, asked: Query[TokensAsked]) -> HttpResponseBase:
    """A window of the stream of a step: the prompt that the engine read, then the completion that it sampled.

    JSON, or with `Accept: application/vnd.apache.arrow.stream` an Arrow IPC stream.
    """
    trajectory = the_trajectory(request, code)
    _one_step(trajectory, index)
    return conditional(
        request, trajectory, lambda: columns_answer(request, code, of_step(request, trajectory, index, asked), asked)
    )


@router.get("/trajectories/{code}/rows", response=AnswerItems[RowValues], openapi_extra=KEPT)
def list_rows(request: HttpRequest, code: str) -> HttpResponseBase:
    """The training rows of a trajectory, without tokens. Of an unfinished one: the rows that its steps make so far."""
    trajectory = the_trajectory(request, code)

    def build() -> HttpResponseBase:
        rows, steps = trajectory_parts.rows_and_steps(trajectory)
        columns = trajectory_parts.column_names(trajectory) | engine_columns.names_beside(rows, steps)
        return json_page(AnswerItems([RowValues.of(row, columns) for row in rows]))

    return conditional(request, trajectory, build)


@router.get("/trajectories/{code}/rows/{index}/tokens", response=TokenColumns, openapi_extra=TOKENS)
def get_row_tokens(request: HttpRequest, code: str, index: Index, asked: Query[TokensAsked]) -> HttpResponseBase:
    """A window of the tokens of a row, with the columns that a trainer wrote.

    JSON, or with `Accept: application/vnd.apache.arrow.stream` an Arrow IPC stream.
    """
    trajectory = the_trajectory(request, code)

    def build() -> HttpResponseBase:
        rows, steps = trajectory_parts.rows_and_steps(trajectory)
        row = found(rows[index] if index < len(rows) else None, "row", str(index))
        return columns_answer(request, code, of_window(request, trajectory, row, steps, asked), asked)

    return conditional(request, trajectory, build)


@router.get("/trajectories/{code}/findings", response=AnswerPart[FindingValues], openapi_extra=KEPT)
def list_findings(request: HttpRequest, code: str, asked: Query[FindingsOfTrajectoryAsked]) -> HttpResponseBase:
    """The findings of a trajectory, in reading order."""
    trajectory = the_trajectory(request, code)
    first, muted = _position("numbers", asked.cursor), sorted(muted_in(trajectory.run))

    def build() -> HttpResponseBase:
        findings = trajectory_parts.findings_in_order(trajectory)[first : first + asked.limit + 1]
        part = cut_part("numbers", list(enumerate(findings, start=first + 1)), asked.limit, lambda pair: pair[:1])
        return json_page(AnswerPart.of(part, lambda pair: FindingValues.of(pair[1], trajectory.code, pair[0], muted)))

    return conditional(request, trajectory, build, muted)


@router.get("/trajectories/{code}/findings/{number}", response=WholeFinding, openapi_extra=KEPT)
def get_finding(request: HttpRequest, code: str, number: Path[Count]) -> HttpResponseBase:
    """One finding by its number, from 1, with the tokens that it is about."""
    trajectory = the_trajectory(request, code)
    finding = found(trajectory_parts.numbered_finding(trajectory, number), "finding", str(number))
    muted = sorted(muted_in(trajectory.run))
    values = FindingValues.of(finding, trajectory.code, number, muted)
    whole = WholeFinding(values, finding.expected_ids.tolist(), finding.actual_ids.tolist())
    return conditional(request, trajectory, lambda: json_page(whole), muted)


# -- rows by strategy --------------------------------------------------------------------------------------------------


@router.post("/trajectories/{code}/replay", response={200: ReplayValues, 202: ReplayValues}, openapi_extra=extra(409))
def replay(request: HttpRequest, code: str) -> HttpResponseBase:
    """Have a worker replay every strategy over a trajectory; 200 where the replay is there already."""
    trajectory = the_trajectory(request, code)
    require(request, trajectory, Role.MEMBER)
    if is_active(trajectory):
        raise ApiProblem(409, "This trajectory is not finished. Ask again when it has ended.")
    if refusal := trajectory_replays.missing(trajectory):
        raise ApiProblem(409, refusal.sentence)
    stored, is_new = trajectory_replays.ask(trajectory, again=True, user=request.user)
    if is_new and (sentence := send_job(stored.job)):
        raise ApiProblem(503, sentence)
    return answer(_replay(stored, trajectory), 202 if is_active(stored.job) else 200)


@router.get("/trajectories/{code}/strategies", response=ReplayValues, openapi_extra=extra(409))
def get_strategies(request: HttpRequest, code: str) -> HttpResponseBase:
    """What every strategy makes of a trajectory, in figures. 409 where nobody has asked for the replay."""
    trajectory = the_trajectory(request, code)
    return answer(_replay(_current(trajectory), trajectory))


@router.get(
    "/trajectories/{code}/strategies/{strategy}/rows", response=AnswerItems[RowValues], openapi_extra=extra(409)
)
def list_strategy_rows(request: HttpRequest, code: str, strategy: str) -> HttpResponseBase:
    """The rows that a strategy makes of a trajectory, without tokens."""
    trajectory = the_trajectory(request, code)
    rows = _strategy_rows(trajectory, strategy)
    masks = (trajectory_replays.row_of(rows, index).loss_mask for index in range(len(rows.lengths)))
    items = [
        RowValues(index, length, int(mask.sum()), False, [], [], True)
        for index, (length, mask) in enumerate(zip(rows.lengths, masks, strict=True))
    ]
    return answer(AnswerItems(items))


@router.get(
    "/trajectories/{code}/strategies/{strategy}/rows/{index}/tokens",
    response=TokenColumns,
    openapi_extra=extra(409, 422, answers=ARROW_ANSWER),
)
def get_strategy_tokens(
    request: HttpRequest, code: str, strategy: str, index: Index, asked: Query[TokensAsked]
) -> HttpResponseBase:
    """A window of the tokens of a row that a strategy makes. JSON or an Arrow IPC stream, as for a stored row."""
    trajectory = the_trajectory(request, code)
    rows = _strategy_rows(trajectory, strategy)
    if index >= len(rows.lengths):
        found(None, "row", str(index))
    return columns_answer(request, code, of_row(request, trajectory_replays.row_of(rows, index), asked), asked)


def _current(trajectory: StoredTrajectory) -> Replay:
    stored = trajectory_replays.current(trajectory)
    if stored is None:
        raise ApiProblem(409, f"Nobody has replayed this trajectory yet: POST /api/v1/trajectories/{trajectory.code}"
                              "/replay begins it.")
    return stored


def _replay(made: Replay, trajectory: StoredTrajectory) -> ReplayValues:
    made.trajectory = trajectory
    made.job.replay = made
    return ReplayValues(trajectory.code, job_answer(made.job), (made.report or {}).get("strategies", []))


def _strategy_rows(trajectory: StoredTrajectory, slug: str) -> ReplayRows:
    """The stored rows of a strategy. Raises :class:`ApiProblem`."""
    if slug not in STRATEGIES:
        raise ApiProblem(404, f"There is no strategy {slug[:40]!r}. Known: {', '.join(STRATEGIES)}.")
    stored = _current(trajectory)
    if is_active(stored.job):
        raise ApiProblem(409, f"The replay is under way: wait for the job {stored.job.code}.")
    rows = stored_rows(stored, [slug]).get(slug)
    if rows is None:
        raise ApiProblem(409, "The replay stored no rows of this strategy: it was refused, failed, or made too many "
                              f"tokens. GET /api/v1/trajectories/{trajectory.code}/strategies says which.")
    return rows


# -- steps -------------------------------------------------------------------------------------------------------------


def _position(name: str, cursor: str) -> int:
    """The position at which a part begins."""
    position = read_cursor(cursor, name, int)
    return min(position[0], 2**31) if position else 0


def _one_step(trajectory: StoredTrajectory, index: int) -> Any:
    steps = trajectory_parts.read_steps(trajectory, index, 1)
    return StepValues.of(found(steps[0] if steps else None, "step", str(index)))
