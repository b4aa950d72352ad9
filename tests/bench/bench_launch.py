"""A launched run, its writes and its diagnosis included, beside a bare loop around the same engine. Ratios, printed.

The bare loop (rollouts/gpu_proof/bare.py) runs where the engine is, in its process and thread, and drives it directly:
the same prompts, turns, lengths, tool answers and concurrency, and nothing else. Runs and loops alternate.

On a machine that others use, both wait for cores, and not equally long. So a second ratio leaves out the time that the
engine's own thread stood ready to run and got no core. Of a run it is the lower bound: what the worker's other threads
and processes wait for cores is not left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from rollouts import selectors
from rollouts.gpu_proof.bare import plan
from rollouts.launch import LaunchForm, launch, served_models
from rollouts.models import Finding, Run
from rollouts.tasks import launch as work
from tests.bench.engine_calls import bare, forget, waited_for_a_core

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

LIVE = work.MAX_LIVE
PROMPTS, GROUP = 128, 4
PAIRS = int(os.environ.get("BENCH_PAIRS", "5"))


@pytest.fixture(autouse=True)
def engines(tiny_tokenizer: Path) -> Iterator[None]:
    yield
    work.close_engines()


def launched(engine: str, prompts: int, seed: int) -> tuple[Run, float]:
    """A run that is done, and the seconds from its task's start to its end."""
    run = launch(LaunchForm(engine=engine, prompts=prompts, group=GROUP, seed=seed), enqueue=False)
    began = time.perf_counter()
    work.work_on(run.pk)
    seconds = time.perf_counter() - began
    run.refresh_from_db()
    assert run.status == "done" and not run.n_failed, run.error
    return run, seconds


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_throughput_against_a_bare_loop(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    launched(engine, 16, 1)  # loads the engine and fills every cache
    owner = work.engine_of(served_models()["demo"], engine)

    def waited() -> float:
        return owner.call(waited_for_a_core).result()

    ratios, quiet_ratios = [], []
    for pair in range(PAIRS):
        owner.call(forget).result()
        start = waited()
        run, seconds = launched(engine, PROMPTS, 10 + pair)
        waited_run = waited() - start
        plans = [plan(one, pair) for one in selectors.load_trajectories(list(run.trajectories.order_by("index")))]
        start = waited()
        measured = owner.call(partial(bare, plans, LIVE)).result()
        waited_bare = waited() - start
        assert measured.tokens == run.n_sampled
        ratios.append(measured.seconds / seconds)
        quiet_ratios.append((measured.seconds - waited_bare) / (seconds - waited_run))
        print(
            f"\n{engine}: {len(plans)} trajectories, {run.n_steps} steps, {run.n_sampled} tokens, "
            f"{Finding.objects.filter(run=run).count()} findings; worker {run.n_sampled / seconds:,.0f} tokens/s, "
            f"bare loop {measured.tokens_per_second:,.0f}; ratio {ratios[-1]:.3f}; the engine waited for a core "
            f"{waited_run:.2f} s of {seconds:.2f}, in the bare loop {waited_bare:.2f} of {measured.seconds:.2f}; "
            f"without that {quiet_ratios[-1]:.3f}"
        )
    for what, values in (("ratio", ratios), ("without the waiting for a core", quiet_ratios)):
        print(
            f"{engine}: {what} {median(values):.3f} "
            f"(median of {len(values)} pairs, {min(values):.3f} to {max(values):.3f}; target 0.90)"
        )
