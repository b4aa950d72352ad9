"""The neighbours of a trajectory in its run, under the filter of the list that led to it."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import QueryDict
from django.urls import reverse

from inspector.runs.filters import PARAMETERS, SORTS, TrajectoryFilter
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.services.imports import PROVISIONAL

FILTER_FIELDS = (*PARAMETERS, "sort")
"""Parameters of a run's list that the address of a trajectory keeps."""


@dataclass(frozen=True)
class Siblings:
    """The addresses that the keys ``h`` and ``l`` open, and the filter."""

    previous_url: str
    next_url: str
    at: str
    keep_query: str
    """The filter as a query string, for the other pages of the same trajectory."""
    filter_text: str
    clear_url: str
    list_url: str


def no_siblings() -> Siblings:
    """For the visitor of a share link to one trajectory, who may not open its neighbours."""
    return Siblings("", "", "", "", "", "", "")


def find_siblings(trajectory: StoredTrajectory, params: QueryDict, here: str) -> Siblings:
    """The trajectories before and after it in the list that led to it. Two queries."""
    wanted = TrajectoryFilter.read(params)
    before, after = selectors.neighbours(trajectory, wanted, wanted.sort)
    name = "trajectory" if here == "tokens" else f"trajectory-{here}"
    # The links keep the view and the lens. They drop the place, because it belongs to this trajectory.
    stay = {field: str(params.get(field, "")) for field in ("view", "lens") if here == "tokens"}
    query = wanted.query(**stay)
    run = trajectory.run
    words = ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in wanted.pairs() if field != "sort")
    is_sorted = wanted.sort != "index"
    if is_sorted:
        words = ", ".join(filter(None, [words, f"order: {SORTS.get(wanted.sort, wanted.sort)}"]))
    number = f"{trajectory.index + 1:,} of {max(run.n_trajectories, trajectory.index + 1):,}"
    # The parts of a large import are read side by side.
    place = f"number {number}" if is_sorted else number
    if trajectory.index >= PROVISIONAL:
        place = "numbered when the import has ended"
    return Siblings(
        previous_url=reverse(name, args=[before.code]) + query if before else "",
        next_url=reverse(name, args=[after.code]) + query if after else "",
        at=place,
        keep_query=wanted.query(),
        filter_text=words,
        clear_url=reverse(name, args=[trajectory.code]),
        list_url=reverse("run", args=[run.code]) + wanted.query(),
    )
