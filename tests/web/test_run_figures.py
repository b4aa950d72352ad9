"""The figures of a large run: counted by the worker that ended it, the same as counted now, never stale."""

from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client

from inspector.runs import cached_figures
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run, RunFigures, StoredTrajectory
from rollouts.store.runs import figures
from rollouts.store.runs.run_summary import run_summary
from rollouts.store.runs.runs import recount, start_run
from rollouts.store.trajectories.findings import replace_findings
from rollouts.worker.jobs import do_job
from tests.web.samples import finding, stored_run

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def large_from_three_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LARGE", 2)
    cache.clear()


def findings_of(n: int) -> list[list[Finding]]:
    side = Finding(Axis.STREAM, "branch", Severity.INFO, step=0, evidence="A side call.")
    return [[finding(), side, side][: i % 4] for i in range(n)]


def test_stored_figures_are_those_that_are_counted() -> None:
    run = stored_run(45, findings=findings_of(45))
    body = figures.stored_figures(run)
    assert body is not None
    assert figures.summary_in(body) == run_summary(run)
    for kind in ("", "branch", "boundary_merge", "nothing"):
        assert figures.cost_in(body, kind) == figures.run_cost(run, kind), kind
    assert figures.cost_in(body, "branch").kinds[0].findings == 33


def test_a_run_that_changed_has_none(web: Client) -> None:
    run = stored_run(4, findings=findings_of(4))
    assert figures.stored_figures(run) is not None
    replace_findings(run, [(run.trajectories.get(index=1), [])])
    run.refresh_from_db()
    assert figures.stored_figures(run) is None
    # A page counts anew, and shows the change.
    assert web.get(f"/runs/{run.code}.json").json()["summary"]["finding_counts"] == {"boundary_merge": 2, "branch": 3}
    job, _ = ask_job(run, "diagnose", {})
    do_job(job.pk)
    run.refresh_from_db()
    stored = figures.stored_figures(run)
    assert stored is not None and figures.summary_in(stored).finding_counts == run.finding_counts


def test_a_small_run_is_counted_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "LARGE", 5)
    run = stored_run(4)
    assert not RunFigures.objects.exists() and figures.stored_figures(run) is None
    assert cached_figures.summary_of(run).by_status == {"done": 4}


def test_a_live_large_run_is_not_counted_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(4)
    start_run(run)
    counted: list[Run] = []
    count = run_summary
    monkeypatch.setattr(cached_figures, "run_summary", lambda one: counted.append(one) or count(one))
    first = cached_figures.summary_of(run)
    assert cached_figures.summary_of(run) == first and len(counted) == 1


def test_without_redis_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(4)
    start_run(run)

    def away(*_: object) -> None:
        raise ConnectionError("no Redis")

    monkeypatch.setattr(cache, "get", away)
    monkeypatch.setattr(cache, "set", away)
    assert cached_figures.summary_of(run).by_status == {"done": 4}


@pytest.mark.parametrize(
    ("address", "most"),
    # session, user, run, roles, figures, jobs, trajectories, tags, group stats, kinds of findings, muted kinds,
    # alarms, causes of the gap, comments, seen, tokenizers; what
    # passes a filter is counted; the cost asks for the replays and the damage too
    [
        ("", 19),
        (".json", 15),
        ("/cost", 12),
        ("/cost?finding=branch", 12),
        ("?finding=branch&at=0", 20),
        ("?flawed=1", 20),
    ],
)
def test_a_large_run_asks_a_handful(web: Client, address: str, most: int, django_assert_num_queries: Any) -> None:
    for n in (4, 60):
        run = stored_run(n, findings=findings_of(n))
        with django_assert_num_queries(most):
            assert web.get(f"/runs/{run.code}{address}").status_code == 200


def test_the_mean_reward_of_the_list_is_kept_with_the_run(web: Client) -> None:
    run = stored_run(4)  # rewards 0, 1, 0, 1
    assert web.get("/runs.json").json()["runs"][0]["reward_mean"] == 0.5
    StoredTrajectory.objects.filter(index=0).update(reward=None)
    recount(run)
    assert web.get("/runs.json").json()["runs"][0]["reward_mean"] == pytest.approx(2 / 3)
    StoredTrajectory.objects.update(reward=None)
    recount(run)
    assert web.get("/runs.json").json()["runs"][0]["reward_mean"] is None
