"""Fifty runs through one worker: what its processes hold in memory. Megabytes, printed."""

import gc
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.processes import family, megabytes, sums
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.worker import run_rollouts

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]

RUNS = int(os.environ.get("BENCH_RUNS", "50"))
SHOWN = (5, 10, 20, 30, 40, 50)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_memory_over_many_runs(engine: str, request: pytest.FixtureRequest) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from /proc, which this system lacks")
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    shown: dict[int, Counter[str]] = {}
    for n in range(1, RUNS + 1):
        run = launch(LaunchSettings(engine=engine, prompts=8, group=4, seed=n), enqueue=False)
        run_rollouts.work_on(run.pk)
        run.refresh_from_db()
        assert (run.status, run.n_finished) == ("done", 32)
        if n in SHOWN or n == RUNS:
            gc.collect()
            shown[n] = sums(megabytes, family())
            print(f"\n{engine} {n:3} runs: {', '.join(f'{name} {size:.1f}' for name, size in shown[n].items())} MB")
    if 10 in shown and RUNS > 10:
        grown = {name: shown[RUNS][name] - size for name, size in shown[10].items()}
        print(
            f"{engine}: grown from run 10 to run {RUNS}: {', '.join(f'{k} {v:+.1f}' for k, v in grown.items())} MB, "
            f"{sum(grown.values()) / (RUNS - 10) * 1000:+.0f} kB a run"
        )
