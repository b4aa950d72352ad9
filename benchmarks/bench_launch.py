"""A launched run, its writes and its diagnosis included, beside a bare loop around the same engine. Ratios, printed.

The bare loop (tools/gpu_proof/bare.py) runs where the engine is, in its process and thread, and drives it directly:
the same prompts, turns, lengths, tool answers and concurrency, and nothing else. Runs and loops alternate.

On a machine that others use, both wait for cores, and not equally long. So a second ratio leaves out the time that the
engine's own thread stood ready to run and got no core. Of a run it is the lower bound: what the worker's other threads
and processes wait for cores is not left out. A third one compares the processor seconds of the engine's thread: what a
run adds to its work (further steps, requests and completions that cross the pipe), whoever else wants the cores. It is
an upper bound, because an engine that has nothing to do does not count.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import pytest
from django.db import connection

from benchmarks.engine_calls import bare, computed, forget, is_busy, waited_for_a_core
from benchmarks.processes import family, processor_seconds, sums
from rollouts.jobs.launch import LaunchSettings, launch, served_models
from rollouts.jobs.warm_engines import engine_of, live_trajectories
from rollouts.store.models import Run, StoredFinding, StoredTrajectory
from rollouts.store.runs.runs import cancel_run
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.worker import run_rollouts
from tools.gpu_proof.bare import plan

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]

PROMPTS, GROUP = 128, 4
PAIRS = int(os.environ.get("BENCH_PAIRS", "5"))
CANCELS = int(os.environ.get("BENCH_CANCELS", "20"))
RATIOS = ("ratio", "without the waiting for a core", "processor seconds of the engine's thread")


def launched(engine: str, prompts: int, seed: int) -> tuple[Run, float]:
    """A run that is done, and the seconds from its task's start to its end."""
    run = launch(LaunchSettings(engine=engine, prompts=prompts, group=GROUP, seed=seed), enqueue=False)
    began = time.perf_counter()
    run_rollouts.work_on(run.pk)
    seconds = time.perf_counter() - began
    run.refresh_from_db()
    assert run.status == "done" and not run.n_failed, run.error
    return run, seconds


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_throughput_against_a_bare_loop(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    launched(engine, 16, 1)  # loads the engine and fills every cache
    model = served_models()["demo"]
    owner, live = engine_of(model, engine), live_trajectories(model, engine)

    def spent() -> tuple[float, float]:
        return owner.call(waited_for_a_core).result(), owner.call(computed).result()

    ratios: dict[str, list[float]] = {name: [] for name in RATIOS}
    for pair in range(PAIRS):
        owner.call(forget).result()
        start, processors = spent(), sums(processor_seconds, family())
        run, seconds = launched(engine, PROMPTS, 10 + pair)
        waited, busy = (after - before for after, before in zip(spent(), start, strict=True))
        processors = sums(processor_seconds, family()) - processors
        plans = [plan(one, pair) for one in load_trajectories(list(run.trajectories.order_by("index")))]
        start = spent()
        measured = owner.call(partial(bare, plans, live)).result()
        waited_bare, busy_bare = (after - before for after, before in zip(spent(), start, strict=True))
        assert measured.tokens == run.n_sampled
        found = (measured.seconds / seconds, (measured.seconds - waited_bare) / (seconds - waited), busy_bare / busy)
        for values, value in zip(ratios.values(), found, strict=True):
            values.append(value)
        print(
            f"\n{engine}: {len(plans)} trajectories, {run.n_steps} steps, {run.n_sampled} tokens, "
            f"{StoredFinding.objects.filter(run=run).count()} findings; "
            f"worker {run.n_sampled / seconds:,.0f} tokens/s, "
            f"bare loop {measured.tokens_per_second:,.0f}; ratio {found[0]:.3f}; the engine waited for a core "
            f"{waited:.2f} s of {seconds:.2f}, in the bare loop {waited_bare:.2f} of {measured.seconds:.2f}; "
            f"without that {found[1]:.3f}; its thread computed {busy:.2f} s, in the bare loop {busy_bare:.2f}: "
            f"{found[2]:.3f}; processor seconds: {', '.join(f'{k} {v:.2f}' for k, v in processors.items())}"
        )
    for what, values in ratios.items():
        print(
            f"{engine}: {what} {median(values):.3f} "
            f"(median of {len(values)} pairs, {min(values):.3f} to {max(values):.3f}; target 0.90)"
        )


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_seconds_until_a_cancelled_runs_requests_are_dropped(engine: str, request: pytest.FixtureRequest) -> None:
    """From the moment of asking, as the page does, to the moment when the engine has nothing under way."""
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    launched(engine, 4, 1)
    owner = engine_of(served_models()["demo"], engine)
    seconds = []
    for n in range(CANCELS):
        run = launch(LaunchSettings(engine=engine, prompts=PROMPTS, group=GROUP, seed=100 + n), enqueue=False)
        with ThreadPoolExecutor(1) as pool:
            worked = pool.submit(_work_and_close, run.pk)
            while not StoredTrajectory.objects.filter(run=run, status="done").exists():
                assert not worked.done(), run.error
                time.sleep(0.02 + 0.02 * (n % 10))  # not always at the same moment of the worker's own polls
            began = time.perf_counter()
            cancel_run(run)
            while owner.call(is_busy).result():
                pass
            seconds.append(time.perf_counter() - began)
            worked.result()
        run.refresh_from_db()
        assert run.status == "cancelled"
    print(
        f"\n{engine}: requests dropped {median(seconds):.2f} s after a run was cancelled "
        f"(median of {len(seconds)}, {min(seconds):.2f} to {max(seconds):.2f}; target 2)"
    )


def _work_and_close(key: int) -> None:
    try:
        run_rollouts.work_on(key)
    finally:
        connection.close()
