"""Searches: runs and trajectories by a name, and places in tokens, findings and metadata."""

from dataclasses import dataclass
from typing import Annotated, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import Field

from inspector.api.answers import (
    AnswerPart, FoundTrajectory, LongText, PartAsked, RunOfProject, answer, extra, run_line, the_run
)
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.search.search_page import SearchBusy, SearchResult, search_page, search_turn
from inspector.web.access import access
from inspector.web.twins import ApiProblem, Page
from rollout_inspector.refusal import Refusal
from rollouts.jobs.search import SearchQuestion
from rollouts.store.parameters import Text
from rollouts.store.people.visible_objects import visible_trajectories
from rollouts.store.runs.runs import RunFilters, visible_runs
from rollouts.store.trajectory_filters import TrajectoryFilters

router = Router(tags=["search"])


class SearchAsked(PartAsked):
    """What is searched for: a name by ``text``, or a place by ``by`` and ``q``. ``cursor`` goes with one of them."""

    text: Text = ""
    """A part of a run's name or model or of a trajectory's external id; or a whole code or group."""
    kind: Literal["", "runs", "trajectories"] = ""
    """What is searched for ``text``; empty = the first part of both."""
    by: Literal["", "text", "ids", "regex", "metadata", "finding"] = ""
    """What ``q`` is; empty = no places are searched."""
    q: Annotated[LongText, Field(max_length=2000)] = ""
    """What is looked for: a text, ids such as `271 * 151657`, an expression, a kind of finding."""
    run: Text = ""
    """Code of the run in which places are searched; empty = all that may be seen."""
    finding: Text = ""
    """Only in trajectories with a finding of this kind; without ``q`` the findings themselves are found."""


@dataclass(frozen=True)
class SearchPart(Page):
    """Part of what a search finds."""

    runs: list[RunOfProject]
    """Runs whose name or model holds the text, or whose code it is."""
    trajectories: list[FoundTrajectory]
    """Trajectories whose external id holds the text, or whose code or group it is."""
    next_runs: str | None
    """What ``cursor`` takes, with ``kind=runs``, for more runs; null = there are none."""
    next_trajectories: str | None
    """What ``cursor`` takes, with ``kind=trajectories``, for more trajectories; null = there are none."""
    results: list[SearchResult]
    """Ranges of tokens, findings or metadata, where ``by`` and ``q`` ask for them."""
    next_results: str | None
    """What ``cursor`` takes for more results; null = everything was searched. An empty part may have a next one."""
    notes: list[str]
    """Sentences about what could not be searched for results."""


@router.get("/search", response=SearchPart, openapi_extra=extra(422))
def search(request: HttpRequest, asked: Query[SearchAsked]) -> HttpResponse:
    """Runs and trajectories by a name, or places in tokens, findings and metadata; newest first."""
    if bool(asked.text) == bool(asked.by):
        field = "by" if asked.by else "text"
        raise Refusal("Send text for runs and trajectories, or by and q for places.", field=field)
    if asked.by:
        return answer(_places(request, asked))
    cursor = asked.cursor if asked.kind else ""
    runs, trajectories = AnswerPart[RunOfProject]([], None), AnswerPart[FoundTrajectory]([], None)
    if asked.kind != "trajectories":
        filters = RunFilters(text=asked.text)
        runs = AnswerPart.of(visible_runs(access(request), filters, cursor, asked.limit), run_line)
    if asked.kind != "runs":
        by_name = visible_trajectories(access(request), asked.text, cursor, asked.limit)
        trajectories = AnswerPart.of(by_name, lambda one: FoundTrajectory.of(TrajectoryValues.of(one, one.run)))
    return answer(SearchPart(runs.items, trajectories.items, runs.next, trajectories.next, [], None, []))


def _places(request: HttpRequest, asked: SearchAsked) -> SearchPart:
    run = the_run(request, asked.run) if asked.run else None
    try:
        with search_turn():
            question = SearchQuestion.read(asked.by, asked.q, TrajectoryFilters(kind=asked.finding))
        result, _ = search_page(request, question, run, asked.cursor, asked.limit)
    except Refusal as refusal:
        raise ApiProblem(422, str(refusal), {refusal.field or "q": [str(refusal)]}) from refusal
    except SearchBusy as busy:
        raise ApiProblem(503, "Other searches are under way. Ask again in some seconds.") from busy
    return SearchPart([], [], None, None, result.results, result.next, result.notes)
