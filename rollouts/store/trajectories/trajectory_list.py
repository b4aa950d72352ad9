"""The trajectories of a run as a list: filters, orders, parts, neighbours. A run may have hundreds of thousands. So the
keys are found first, in an index that also holds the columns of the filters, and only then the trajectories are read. A
list is read in stretches, each of which is one range of an index."""

import json
import math
from base64 import urlsafe_b64decode
from collections.abc import Sequence

from django.db.models import Q, QuerySet

from rollouts.store import models
from rollouts.store.paging import ListPart, cut_part
from rollouts.store.parameters import SORTS
from rollouts.store.trajectory_filters import TrajectoryFilters, filter_trajectories

MAX_COUNTED = 10_000  # What passes a filter is counted so far: it bounds what a page of a large run costs.


def list_trajectories(
    run: models.Run, filters: TrajectoryFilters | None = None, sort: str = "index", after: str = "", limit: int = 50,
) -> ListPart[models.StoredTrajectory]:
    """A part of the list, by keyset. An unknown sort or a cursor that cannot be read starts at the beginning.
    Trajectories that lack what they are sorted by are last in both orders. One query for each stretch that the part
    touches: one in run order, at most three in another one."""
    if sort not in SORTS:
        sort = "index"
    passing_trajectories = filter_trajectories(run, filters or TrajectoryFilters())
    items = _take(passing_trajectories, _stretches(sort, _read_cursor(after, sort)), limit + 1)
    return cut_part(sort, items, limit, lambda last: (getattr(last, sort.removeprefix("-")), last.index))


def neighbours(
    trajectory: models.StoredTrajectory, filters: TrajectoryFilters | None = None, sort: str = "index"
) -> tuple[models.StoredTrajectory | None, models.StoredTrajectory | None]:
    """The trajectories before and after it, in the order of a list, among those that pass. Two queries in run order, at
    most six in another one."""
    passing_trajectories = filter_trajectories(trajectory.run, filters or TrajectoryFilters())
    if sort not in SORTS:
        sort = "index"
    place = getattr(trajectory, sort.removeprefix("-")), trajectory.index
    before = _take(passing_trajectories, _stretches_before(sort, place), 1)
    after = _take(passing_trajectories, _stretches(sort, place), 1)
    return before[0] if before else None, after[0] if after else None


def count_trajectories(run: models.Run, filters: TrajectoryFilters) -> int:
    """The number of trajectories that pass, or ``MAX_COUNTED + 1`` where there are more. At most one query; none where
    the totals of the run tell it."""
    if filters.pass_all:
        return run.n_trajectories
    return _count(filter_trajectories(run, filters), MAX_COUNTED)


def count_before(trajectory: models.StoredTrajectory, filters: TrajectoryFilters, sort: str) -> int:
    """The number of trajectories before it in a list, or ``MAX_COUNTED + 1`` if there are more. At most two queries."""
    sort = sort if sort in SORTS else "index"
    if filters.pass_all and sort == "index":
        return trajectory.index
    passing_trajectories = filter_trajectories(trajectory.run, filters)
    n = 0
    for condition, _ in _stretches_before(sort, (getattr(trajectory, sort.removeprefix("-")), trajectory.index)):
        n += _count(passing_trajectories.filter(condition), MAX_COUNTED - n) if n <= MAX_COUNTED else 0
    return n


def passes(trajectory: models.StoredTrajectory, filters: TrajectoryFilters) -> bool:
    """Whether a trajectory passes. At most one query."""
    return filters.pass_all or filter_trajectories(trajectory.run, filters).filter(pk=trajectory.pk).exists()


def _count(found: QuerySet[models.StoredTrajectory], most: int) -> int:
    return found.order_by().values("pk")[: most + 1].count()


TEXTS = ("group", "stop_reason")
NULLABLE = ("reward", "n_lost", "training_step", "damage")
"""The columns of an order that hold texts, and those that may lack a value."""
Place = tuple[float | str | None, int]
"""The value of the column that a list is sorted by, None = it has none, and the index of a trajectory."""
Stretch = tuple[Q, tuple[str, ...]]  # A condition, and the order of the trajectories that meet it.


def _stretches(sort: str, place: Place | None) -> list[Stretch]:
    """What follows a place of the list, None = the whole list, in order. A condition with *or* in it would read every
    trajectory of an equal value, and no index has those without a reward last in both databases."""
    column, descending = sort.removeprefix("-"), sort.startswith("-")
    value, index = place or (None, -1)
    if column == "index":
        return [(Q() if place is None else Q(**{f"index__{'lt' if descending else 'gt'}": index}), (sort,))]
    is_null, not_null = Q(**{f"{column}__isnull": True}), Q(**{f"{column}__isnull": False})
    if place is not None and value is None:
        return [(is_null & Q(index__gt=index), ("index",))]
    none = [(is_null, ("index",))] if column in NULLABLE else []
    if place is None:
        return [(not_null if none else Q(), (sort, "index")), *none]
    further = Q(**{f"{column}__{'lt' if descending else 'gt'}": value})
    return [(Q(**{column: value}, index__gt=index), ("index",)), (further, (sort, "index")), *none]


def _stretches_before(sort: str, place: Place) -> list[Stretch]:
    """What stands before a place of the list, the nearest first."""
    column, descending = sort.removeprefix("-"), sort.startswith("-")
    value, index = place
    back = column if descending else f"-{column}"
    if column == "index":
        return [(Q(**{f"index__{'gt' if descending else 'lt'}": index}), (back,))]
    if value is None:
        not_null = Q(**{f"{column}__isnull": False})
        return [(Q(**{f"{column}__isnull": True}, index__lt=index), ("-index",)), (not_null, (back, "-index"))]
    nearer = Q(**{f"{column}__{'gt' if descending else 'lt'}": value})
    return [(Q(**{column: value}, index__lt=index), ("-index",)), (nearer, (back, "-index"))]


def _take(
    found: QuerySet[models.StoredTrajectory], stretches: Sequence[Stretch], limit: int
) -> list[models.StoredTrajectory]:
    """The first trajectories of some stretches. One query for each stretch that is needed."""
    items: list[models.StoredTrajectory] = []
    for condition, order in stretches:
        if len(items) < limit:
            keys = found.filter(condition).order_by(*order).values("pk")[: limit - len(items)]
            items += models.StoredTrajectory.objects.filter(pk__in=keys).order_by(*order)
    return items


def is_cursor(text: str, sort: str) -> bool:
    """Whether a list of trajectories in this order can go on behind the cursor."""
    return _read_cursor(text, sort) is not None


def _read_cursor(text: str, sort: str) -> Place | None:
    try:
        made_for, value, index = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if made_for != sort or not -1 <= int(index) < 2**31:
            return None
        if sort.removeprefix("-") in TEXTS:
            value.encode()  # half of a surrogate pair is no text for a database
            return (value, int(index)) if "\0" not in value else None
        number = None if value is None else float(value)
        return (number, int(index)) if number is None or math.isfinite(number) else None
    except (AttributeError, ValueError, TypeError, RecursionError, OverflowError):
        return None


def passing(
    trajectories: QuerySet[models.StoredTrajectory], run: models.Run, filters: TrajectoryFilters
) -> QuerySet[models.StoredTrajectory]:
    """Those of a query for trajectories of a run that pass."""
    return trajectories.filter(pk__in=filter_trajectories(run, filters).values("pk"))
