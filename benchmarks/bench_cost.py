"""What the lists and counts of a large run cost to draw: `pytest benchmarks/bench_cost.py -s`.

The run holds 100,000 trajectories (INSPECTOR_BENCH_TRAJECTORIES) with rewards and 150,000 findings. Printed is the
median of the whole request, what of it the database takes, and the request's ratio to the same page of a run of 200
trajectories, measured in turns. DATABASE_URL chooses PostgreSQL.
"""

import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test import Client

from rollout_inspector.diagnose import KINDS, VERSION
from rollout_inspector.streams.trajectory import ids_array
from rollouts.store import models
from rollouts.store.runs.runs import create_run, end_run, recount
from tests.people import make_member

pytestmark = pytest.mark.django_db

N = int(os.environ.get("INSPECTOR_BENCH_TRAJECTORIES", "100000"))
BATCH = 5_000
TIMES = 9


def large_run(n: int = N) -> models.Run:
    """A finished run with as many trajectories, and 1.5 findings each on average; rows of the tables alone."""
    rng = np.random.default_rng(0)
    run = create_run("import", "large")
    kinds = sorted(KINDS)[:24]
    ids, text = ids_array(range(40)), "The prompt of step 3 leaves the stream of step 2. " * 4
    for start in range(0, n, BATCH):
        size = min(BATCH, n - start)
        # Half of the runs in use score 0 or 1, the others anything: the harder case.
        rewards, counts, steps = rng.random(size), rng.poisson(1.5, size), rng.integers(1, 30, size)
        trajectories = models.StoredTrajectory.objects.bulk_create(
            models.StoredTrajectory(
                run=run, external_id=f"t{start + i:06}", index=start + i, group=f"g{(start + i) // 8}",
                stop_reason=("answered", "max_turns", "length")[i % 3], reward=float(rewards[i]),
                n_steps=int(steps[i]), n_rows=1, n_tokens=4000, n_sampled=900, n_trained=900,
                n_findings=int(counts[i]), worst_severity="error" if counts[i] else "",
            )
            for i in range(size)
        )
        models.StoredFinding.objects.bulk_create(
            models.StoredFinding(
                trajectory=record, run=run, step_index=int(rng.integers(0, steps[i])), row_index=0, axis="stream",
                kind=kinds[int(rng.zipf(1.6)) % len(kinds)], severity="error", start=10, stop=20, expected_ids=ids,
                actual_ids=ids, expected_text=text, actual_text=text, evidence=text, remedy=text,
                trained_tokens_lost=50, rows=2, prompt_tokens_repaid=300, version=VERSION,
            )
            for i, record in enumerate(trajectories)
            for _ in range(counts[i])
        )
    recount(run)
    end_run(run, models.Run.Status.DONE)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL max_parallel_workers_per_gather = 0")
    return run


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without a line in the log for each request."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def medians(web: Client, pages: Sequence[str]) -> list[tuple[float, float, int]]:
    """For each page (ms of a request, ms of it in the database, queries); asked in turns."""
    whole: list[list[float]] = [[] for _ in pages]
    inside: list[list[float]] = [[] for _ in pages]
    queries = [0] * len(pages)
    for _ in range(TIMES):
        for n, address in enumerate(pages):
            clock = _Clock()
            start = time.perf_counter()
            with connection.execute_wrapper(clock):
                answer = web.get(address)
            whole[n].append((time.perf_counter() - start) * 1e3)
            inside[n].append(clock.seconds * 1e3)
            queries[n] = clock.queries
            assert answer.status_code == 200
    return [(statistics.median(a), statistics.median(b), n) for a, b, n in zip(whole, inside, queries, strict=True)]


class _Clock:
    """Adds up what the database takes."""

    def __init__(self) -> None:
        self.seconds, self.queries = 0.0, 0

    def __call__(self, execute: Any, *given: Any) -> Any:
        start = time.perf_counter()
        try:
            return execute(*given)
        finally:
            self.seconds += time.perf_counter() - start
            self.queries += 1


def addresses(run: models.Run) -> dict[str, str]:
    """What is asked: page -> address."""
    here, counts = f"/runs/{run.code}", run.finding_counts
    common, rare = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    code = run.trajectories.get(index=run.n_trajectories // 2).code
    return {
        "list of runs": "/",
        "run": here,
        "run, as JSON": f"{here}.json",
        "cost": f"{here}/cost",
        "cost of one kind": f"{here}/cost?finding={common}",
        "list, by a rare kind": f"{here}?finding={rare}",
        "list, by a common kind": f"{here}?finding={common}",
        "list, by kind and step": f"{here}?finding={common}&at=20",
        "list, by step": f"{here}?at=25",
        "list, by severity": f"{here}?severity=error",
        "list, a slice with findings": f"{here}?from=50000&to=54999&flawed=1",
        "list, a slice with a kind": f"{here}?from=50000&to=54999&finding={common}",
        "list, by reward": f"{here}?min=0.999&sort=-reward",
        "list, most findings first": f"{here}?sort=-n_findings",
        "list, by stop reason": f"{here}?stop=length",
        "list, by part of an id": f"{here}?text=t0999",
        "list, by an id that is not there": f"{here}?text=nowhere",
        "a trajectory among its siblings": f"/trajectories/{code}?finding={common}",
    }


def compare(web: Client, large: models.Run, small: models.Run) -> None:
    """Print what each page of the large run takes, beside the same page of the small one."""
    for (name, address), other in zip(addresses(large).items(), addresses(small).values(), strict=True):
        (whole, inside, queries), (small_whole, _, _) = medians(web, [address, other])
        print(f"  {name:34} {whole:6.1f} ms, {inside:6.1f} in {queries:2} queries; {whole / small_whole:5.2f}x")


def test_pages_of_a_large_run() -> None:
    start = time.perf_counter()
    small, large = large_run(200), large_run()
    print(f"\n{connection.vendor}: {N:,} trajectories, {large.findings.count():,} findings, stored in "
          f"{time.perf_counter() - start:.0f} s")
    web = Client()
    web.force_login(make_member("bench"))
    compare(web, large, small)
