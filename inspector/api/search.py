"""A search for runs and trajectories by a text."""

from __future__ import annotations

from typing import Literal

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from pydantic import Field

from inspector.api.answers import answer, part_of
from inspector.api.documented import PartAsked, Text, extra
from inspector.api.values import FoundTrajectory, RunOfProject, SearchPart, run_line
from inspector.web.access import access
from rollouts.selectors import RunFilters, visible_runs
from rollouts.selectors.visible import visible_trajectories

router = Router(tags=["search"])


class SearchAsked(PartAsked):
    """What is searched for. ``cursor`` goes with one ``kind``."""

    text: Text = Field(min_length=1)
    """A part of a run's name or model or of a trajectory's external id; or a whole code or group."""
    kind: Literal["", "runs", "trajectories"] = ""
    """What is searched; empty = the first part of both."""


@router.get("/search", response=SearchPart, openapi_extra=extra(422))
def search(request: HttpRequest, asked: Query[SearchAsked]) -> HttpResponse:
    """Runs and trajectories by a text, newest first."""
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
    return answer(SearchPart(runs, trajectories, next_runs, next_trajectories))
