"""The neighbours of a trajectory in its run, under the filter of the list that led to it."""

from dataclasses import dataclass

from django.http import QueryDict
from django.urls import reverse

from inspector.runs.filters import ORDERS, ListQuery
from inspector.runs.group_page import group_url
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.imports import PROVISIONAL
from rollouts.store.trajectories.trajectory_list import (
    MAX_COUNTED, count_before, count_trajectories, neighbours, passes
)
from rollouts.store.trajectory_filters import PARAMETERS

FILTER_FIELDS = (*PARAMETERS.values(), "sort")  # Parameters of a run's list that the address of a trajectory keeps.


@dataclass(frozen=True)
class Siblings:
    """The addresses that the keys ``h`` and ``l`` open, and the filter. Empty for the visitor of a share link to one
    trajectory, who may not open its neighbours."""

    previous_url: str = ""
    next_url: str = ""
    at: str = ""
    keep_query: str = ""  # The filter as a query string, for the other pages of the same trajectory.
    filter_text: str = ""
    clear_url: str = ""
    list_url: str = ""
    group_url: str = ""  # The trajectories of the same prompt; empty = it has no group.


def find_siblings(trajectory: StoredTrajectory, params: QueryDict, here: str, reader: int | None) -> Siblings:
    """The trajectories before and after it in the list that led to it, and its place there. ``reader``: the key of the
    user who asks; None = a visitor. Two queries in the run's own order, at most eleven in a filtered and sorted
    list."""
    filters = ListQuery.read(params, reader)
    before, after = neighbours(trajectory, filters, filters.sort)
    name = "trajectory" if here == "tokens" else f"trajectory-{here}"
    # The links keep the view and the lens. They drop the place, because it belongs to this trajectory.
    stay = {field: str(params.get(field, "")) for field in ("view", "lens") if here == "tokens"}
    query = filters.query(**stay)
    run = trajectory.run
    words = ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in filters.pairs() if field != "sort")
    is_sorted = filters.sort != "index"
    if is_sorted:
        words = ", ".join(filter(None, [words, f"order: {ORDERS.get(filters.sort, filters.sort)}"]))
    # The parts of a large import are read side by side.
    is_numbered = trajectory.index < PROVISIONAL
    place = _place(trajectory, filters) if is_numbered else "numbered when the import has ended"
    return Siblings(
        previous_url=reverse(name, args=[before.code]) + query if before else "",
        next_url=reverse(name, args=[after.code]) + query if after else "", at=place, keep_query=filters.query(),
        filter_text=words, clear_url=reverse(name, args=[trajectory.code]),
        list_url=reverse("run", args=[run.code]) + filters.query(),
        group_url=group_url(run.code, trajectory.group) if trajectory.group else "",
    )


def _place(trajectory: StoredTrajectory, wanted: ListQuery) -> str:
    """`5 of 252`: its place among those that pass the filter."""
    if not passes(trajectory, wanted):
        return "not in the filtered list"
    place = count_before(trajectory, wanted, wanted.sort) + 1
    total = max(count_trajectories(trajectory.run, wanted), place)
    most = MAX_COUNTED
    if wanted.pass_all and total > most:
        return f"{place:,} of {total:,}" if wanted.sort == "index" or place <= most else f"of {total:,}"
    return (f"{place:,} of " if place <= most else "of ") + (f"{total:,}" if total <= most else f"more than {most:,}")
