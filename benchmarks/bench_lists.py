"""How long the list of a run takes, with a filter, an order, and the lines of prompt and answer. Prints times.

    pytest -q -s benchmarks/bench_lists.py

``BENCH_TRAJECTORIES`` says how many the run has. Queries are asserted, times are printed.
"""

import os
import statistics
import time
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rollout_inspector.streams.trajectory import ids_array
from rollouts.store.models import Run, StoredFinding, StoredTrajectory
from rollouts.store.runs.runs import create_run, end_run
from tests.people import make_member

pytestmark = pytest.mark.django_db
N = int(os.environ.get("BENCH_TRAJECTORIES", "5000"))
ROUNDS = 15
QUERIES = ("", "?sort=-reward", "?finding=boundary_merge", "?severity=error&sort=-n_tokens", "?min=0.5", "?group=g7")


@pytest.fixture
def run() -> Run:
    return stored_run()


def stored_run() -> Run:
    """A run of ``N`` trajectories, every third with a finding."""
    run = create_run("import", "many")
    made = StoredTrajectory.objects.bulk_create(
        (
            StoredTrajectory(
                run=run, external_id=f"t{n:06}", index=n, group=f"g{n // 16}", reward=n % 7 / 7, n_steps=3, n_rows=1,
                n_tokens=500 + n % 97, n_sampled=100, n_trained=100, n_findings=n % 3 == 0, checks={}, n_lost=0,
                worst_severity="error" if n % 3 == 0 else "", stop_reason="answered",
                prompt_line=f"What is {n} times 7? Use the calculator.", answer_line=f"The answer is {7 * n}.",
            )
            for n in range(N)
        ),
        batch_size=2000,
    )
    empty = ids_array([])
    StoredFinding.objects.bulk_create(
        (
            StoredFinding(
                run=run, trajectory=one, step_index=1, axis="stream", kind="boundary_merge", severity="error", start=0,
                stop=1, expected_ids=empty, actual_ids=empty, evidence="x", version=1, trained_tokens_lost=n % 9,
            )
            for n, one in enumerate(made) if one.n_findings
        ),
        batch_size=2000,
    )
    Run.objects.filter(pk=run.pk).update(
        n_trajectories=N, n_finished=N, n_steps=3 * N, n_rows=N, n_rewards=N, finding_counts={"boundary_merge": N // 3}
    )
    run.refresh_from_db()
    end_run(run, "done")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return run


def test_lists(run: Run, django_user_model: Any) -> None:
    client = Client()
    client.force_login(make_member("ada"))
    for query in QUERIES:
        # The list alone, as the API gives it, and the page with its figures.
        for name, address in (
            ("list", f"/api/v1/runs/{run.code}/trajectories{query or '?'}&limit=50"),
            ("page", f"/runs/{run.code}{query}"),
        ):
            with CaptureQueriesContext(connection) as queries:
                assert client.get(address).status_code == 200
            n_queries = len(queries)
            assert n_queries <= 26
            times, processor = [], []
            for _ in range(ROUNDS):
                start = time.perf_counter(), time.thread_time()
                client.get(address)
                times.append(1000 * (time.perf_counter() - start[0]))
                processor.append(1000 * (time.thread_time() - start[1]))
            median, most, computed = statistics.median(times), max(times), statistics.median(processor)
            print(
                f"{name} {query or '(all)':<34} median {median:6.1f} ms, most {most:6.1f}, processor {computed:5.1f}, "
                f"{n_queries} queries"
            )
