"""Searches: runs and trajectories by a name, and places in tokens, findings and metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import Field

from inspector.api.answers import answer, part_of, the_run
from inspector.api.documented import LongText, PartAsked, extra
from inspector.api.values import FoundTrajectory, RunOfProject, SearchPart, run_line
from inspector.search.search_page import SearchBusy, search_page
from inspector.web.access import access
from inspector.web.problems import ApiProblem
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


@router.get("/search", response=SearchPart, openapi_extra=extra(422))
def search(request: HttpRequest, asked: Query[SearchAsked]) -> HttpResponse:
    """Runs and trajectories by a name, or places in tokens, findings and metadata; newest first."""
    if bool(asked.text) == bool(asked.by):
        sentence = "Send text for runs and trajectories, or by and q for places."
        raise ApiProblem(422, sentence, {"by" if asked.by else "text": [sentence]})
    if asked.by:
        return answer(_places(request, asked))
    runs, next_runs = list[RunOfProject](), None
    trajectories, next_trajectories = list[FoundTrajectory](), None
    cursor = asked.cursor if asked.kind else ""
    if asked.kind != "trajectories":
        filters = RunFilters(text=asked.text)
        runs, next_runs = part_of(lambda: visible_runs(access(request), filters, cursor, asked.limit), run_line)
    if asked.kind != "runs":
        trajectories, next_trajectories = part_of(
            lambda: visible_trajectories(access(request), asked.text, cursor, asked.limit), FoundTrajectory.of
        )
    return answer(SearchPart(runs, trajectories, next_runs, next_trajectories, [], None, []))


def _places(request: HttpRequest, asked: SearchAsked) -> SearchPart:
    run = the_run(request, asked.run) if asked.run else None
    try:
        question = SearchQuestion.read(asked.by, asked.q, TrajectoryFilters(kind=asked.finding))
        found, _ = search_page(request, question, run, asked.cursor, asked.limit)
    except Refusal as refusal:
        raise ApiProblem(422, str(refusal), {refusal.field or "q": [str(refusal)]}) from refusal
    except SearchBusy as busy:
        raise ApiProblem(503, "Other searches are under way. Ask again in some seconds.") from busy
    return SearchPart([], [], None, None, found.results, found.next, found.notes)
