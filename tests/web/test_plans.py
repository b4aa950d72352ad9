"""How the database finds what lists show. A plan that reads a whole table is slow as soon as the table is large.

The planner may not read a table in whole, and may not sort, wherever an index serves. Where it still does, none serves.
So a run of a few trajectories shows what one of a million would do.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.trajectory import ids_array
from rollouts.store import models
from rollouts.store.parameters import SORTS
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.runs.training_steps import stored_after
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectory_list import list_trajectories, neighbours
from rollouts.store.trajectory_filters import TrajectoryFilters
from tests.people import make_member
from tests.storage.build import chain

pytestmark = pytest.mark.django_db

RANGED = ("trajectory", "finding", "step", "steptokens", "row", "rejection")
"""Tables of which a page reads ranges of an index: those of a run, of a trajectory, of known keys."""
ORDERED = ("run", "job", "templatecheck", "sharelink")
"""Tables that a page may also read in the order of an index, or as all of an index of a few rows."""
NOT_ORDERED = {
    "n_findings", "n_rows", "group", "training_step",
    *(sign + name for name in ("n_steps", "n_sampled", "n_trained", "n_lost", "stop_reason") for sign in ("", "-")),
    "-group", "-training_step", "damage", "-damage",
}
"""Orders that no index has, because few ask for them: the keys of the run are sorted."""


@dataclass(frozen=True)
class Read:
    """How a plan reads a table."""

    table: str
    by_index: bool
    by_range: bool
    """Only a part of the index."""


@dataclass(frozen=True)
class Plan:
    """How the database finds what a query asks for."""

    sql: str
    reads: list[Read]
    sorts_keys: bool
    """Sorts before the limit of the part is known."""
    text: str

    @property
    def problem(self) -> str:
        """What makes it slow in a large table; empty = nothing."""
        for read in self.reads:
            table = read.table.removeprefix("rollouts_")
            if table == "job" and connection.vendor == "sqlite":
                continue  # it does not see that the index of active jobs serves, and has few jobs
            if (table in RANGED and not read.by_range) or (table in ORDERED and not read.by_index):
                return f"{table} is read in whole:\n{self.sql}\n{self.text}"
        return ""


def plan_of(sql: str, may_sort: bool) -> Plan:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"SET LOCAL enable_sort = {'on' if may_sort else 'off'}")
            for name in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
                cursor.execute(f"SET LOCAL enable_{name} = off")
            cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
            held = cursor.fetchone()[0]
            nodes = list(_nodes((json.loads(held) if isinstance(held, str) else held)[0]["Plan"]))
            reads = [
                Read(node["Relation Name"], node["Node Type"] != "Seq Scan", "Index Cond" in node)
                for node, _ in nodes
                if "Relation Name" in node
            ]
            sorts = any(limited and node["Node Type"] == "Sort" for node, limited in nodes)
            return Plan(sql, reads, sorts, json.dumps([node for node, _ in nodes], indent=1, default=str)[:4000])
        cursor.execute(f"EXPLAIN QUERY PLAN {sql}")
        rows = cursor.fetchall()
    aliases = {alias: table for table, alias in re.findall(r'"(rollouts_\w+)" ([A-Z]\d+)', sql)}
    reads, inner = [], {key for key, _, _, text in rows if "SUBQUERY" in text}
    for _, _, _, text in rows:
        if found := re.match(r"(SCAN|SEARCH) (\w+)", text):
            table = aliases.get(found[2], found[2])
            reads.append(Read(table, found[1] == "SEARCH" or "USING" in text, found[1] == "SEARCH"))
    sorts = any("TEMP B-TREE FOR ORDER BY" in text and parent in inner for _, parent, _, text in rows)
    return Plan(sql, reads, sorts, "\n".join(text for *_, text in rows))


def _nodes(node: dict, limited: bool = False) -> Iterator[tuple[dict, bool]]:
    """Each node of a plan, and whether a limit stands above it."""
    yield node, limited
    for one in node.get("Plans", ()):
        yield from _nodes({**one}, limited or node["Node Type"] == "Limit")


def plans(queries: CaptureQueriesContext, may_sort: bool = True) -> list[Plan]:
    """The plans of what was selected from our tables."""
    asked = [query["sql"] for query in queries.captured_queries]
    return [plan_of(sql, may_sort) for sql in asked if sql.startswith("SELECT") and '"rollouts_' in sql]


@pytest.fixture(scope="module")
def listed(django_db_setup: None, django_db_blocker: Any) -> Iterator[int]:
    """The key of a run of 60 among so many others that reading them all would cost more. It serves the whole module."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield _listed().pk
        transaction.set_rollback(True)


@pytest.fixture
def run(listed: int) -> models.Run:
    return models.Run.objects.get(pk=listed)


def _listed() -> models.Run:
    make_member("somebody")  # the planner knows the tables of users too, as on a server
    other = create_run(models.Run.Kind.IMPORT, "other")
    # With fewer, PostgreSQL may read all; with more, SQLite takes the run for half of the table.
    many = 4000 if connection.vendor == "postgresql" else 2000
    kept = models.StoredTrajectory.objects.bulk_create(
        models.StoredTrajectory(run=other, external_id=str(n), index=n, n_findings=1) for n in range(many)
    )
    empty = ids_array([])
    models.StoredFinding.objects.bulk_create(
        models.StoredFinding(
            run=other, trajectory=one, step_index=1, axis="stream", kind="branch", severity="info", start=0, stop=1,
            expected_ids=empty, actual_ids=empty, evidence="x", version=1,
        )
        for one in kept
    )
    steps = models.StoredStep.objects.bulk_create(
        models.StoredStep(trajectory=one, index=0, prompt_length=0, completion_length=0) for one in kept
    )
    models.StepTokens.objects.bulk_create(
        models.StepTokens(step=one, delta_ids=empty, completion_ids=empty) for one in steps
    )
    rows = models.StoredRow.objects.bulk_create(
        models.StoredRow(trajectory=one, index=0, n_tokens=0, n_trained=0) for one in kept
    )
    models.RowTokens.objects.bulk_create(
        models.RowTokens(row=one, ids=empty, loss_mask=empty.astype(bool)) for one in rows
    )
    two = [Finding(Axis.STREAM, "branch", Severity.WARNING), Finding(Axis.STREAM, "unclassified", Severity.ERROR)]
    run = create_run(models.Run.Kind.IMPORT, "listed")
    values = [replace(chain(f"listed-{n}", 1 + n % 3, n), reward=n % 7 / 7) for n in range(60)]
    save_trajectories(run, values, [two[: n % 3] for n in range(60)])
    end_run(run, models.Run.Status.DONE)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return run


FILTERS = [
    TrajectoryFilters(),
    TrajectoryFilters(kind="branch"),
    TrajectoryFilters(severity="warning"),
    TrajectoryFilters(severity="error"),
    TrajectoryFilters(kind="branch", severity="warning", step=1),
    TrajectoryFilters(step=1),
    TrajectoryFilters(stop_reason="length"),
    TrajectoryFilters(status="failed"),
    TrajectoryFilters(group="g"),
    TrajectoryFilters(text="id"),
    TrajectoryFilters(reward_min=0.1, reward_max=0.5),
    TrajectoryFilters(tokens_min=10, tokens_max=20),
    TrajectoryFilters(policy_version="v1"),
    TrajectoryFilters(flawed=True, first=3, last=50),
    TrajectoryFilters(hide_queued=True),
]


@pytest.mark.parametrize("sort", SORTS)
def test_a_list_and_its_neighbours_read_ranges_in_order(run: models.Run, sort: str) -> None:
    for filters in FILTERS:
        with CaptureQueriesContext(connection) as queries:
            _, following = list_trajectories(run, filters, sort, "", 5)
            list_trajectories(run, filters, sort, following or "", 5)
            neighbours(run.trajectories.select_related("run").get(index=30), filters, sort)
        for plan in plans(queries):
            assert not plan.problem, plan.problem
        if filters == TrajectoryFilters() and sort not in NOT_ORDERED:
            for plan in plans(queries, may_sort=False):
                assert not plan.sorts_keys, f"{plan.sql}\n{plan.text}"


def test_what_was_pushed_last_is_read_by_its_positions(run: models.Run) -> None:
    key = run.trajectories.get(index=40).pk
    with CaptureQueriesContext(connection) as queries:
        assert [one.index for one in stored_after(run, key)[:5]] == [41, 42, 43, 44, 45]
    for plan in plans(queries, may_sort=False):
        assert not plan.problem and not plan.sorts_keys and "by_rows" not in plan.text, plan.text


def test_a_plan_without_an_index_is_seen(run: models.Run) -> None:
    """The test above can fail: neither column has an index, and no index has the order."""
    with CaptureQueriesContext(connection) as queries:
        list(models.StoredTrajectory.objects.filter(n_trained__gt=3))
        list(models.StoredFinding.objects.filter(evidence="x"))
        keys = models.StoredTrajectory.objects.filter(run=run).order_by("n_trained").values("pk")[:5]
        list(models.StoredTrajectory.objects.filter(pk__in=keys))
    first, second, third = plans(queries)
    _, _, unsorted = plans(queries, may_sort=False)
    assert "trajectory is read in whole" in first.problem and "finding is read in whole" in second.problem
    assert not third.problem and unsorted.sorts_keys


@pytest.mark.parametrize(
    ("address", "most"),
    [
        ("/", 11),
        ("/?text=list&status=done&tag=x", 11),
        ("/?after={run}", 12),
        ("/runs/{run}", 24),
        ("/runs/{run}.json?finding=branch&sort=-reward", 21),
        ("/runs/{run}.json?flawed=1&min=0&sort=-reward", 22),
        ("/runs/{run}/cost", 16),
        ("/runs/{run}/alarms", 15),
        ("/trajectories/{trajectory}?finding=branch&sort=n_tokens", 24),
        ("/runs/{run}/search?by=ids&q=1+*+2", 12),
        ("/runs/{run}/search?by=metadata&q=listed-3", 12),
        ("/runs/{run}/search?q=&finding=branch", 12),
        ("/templates", 6),
        ("/shares", 5),
        ("/workers", 6),
    ],
)
def test_pages_read_no_table_in_whole(web: Client, run: models.Run, address: str, most: int) -> None:
    named = {"run": run.code, "trajectory": run.trajectories.get(index=30).code}
    with CaptureQueriesContext(connection) as queries:
        assert web.get(address.format(**named)).status_code == 200
    assert len(queries) <= most
    for plan in plans(queries):
        assert not plan.problem, plan.problem
