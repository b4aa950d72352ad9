"""How much faster two processes audit than one, by turns, beside a loop; with ray, a cluster of two CPUs as well."""

import contextlib
import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.gym_file import write_gym_file
from benchmarks.processes import family, processor_seconds
from rollout_inspector.guard.audit_runners import Done, Todo, on_processes, on_ray
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import Shard, cut_files
from rollout_inspector.text import tokenizers
from rollouts.sampling.demo_policy import MODEL_DIR

pytestmark = pytest.mark.bench
SIZE = int(os.environ.get("BENCH_AUDIT_MB", "128")) << 20
SHARD_LOOP = 3_000_000
FILE = min(SIZE, 64 << 20)
"""Bytes of each file; all hold the same."""
HAS_RAY = importlib.util.find_spec("ray") and os.environ.get("BENCH_AUDIT_RAY", "1") == "1"
TIMES = int(os.environ.get("BENCH_AUDIT_TIMES", "3"))
SETTINGS = AuditSettings(str(MODEL_DIR))


def counted(shard: Shard, settings: AuditSettings) -> pa.Table:
    """Work of about the same length that shares nothing: how much faster two processes are on this machine at all."""
    sum(n * n for n in range(SHARD_LOOP))
    return pa.table({})


def measured(read: Callable[[], Done]) -> tuple[float, float]:
    """Seconds by the clock and seconds of the processor until every shard is read; none may fail."""
    before, spent = _spent(), dict[int, float]()
    start = time.perf_counter()
    for _, table in read():
        assert not isinstance(table, str), table
        spent |= _spent()
    return time.perf_counter() - start, sum(spent.values()) - sum(before.get(pid, 0.0) for pid in spent)


def _spent() -> dict[int, float]:
    """Processor seconds of each process that descends from this one."""
    found = {}
    for pid in family():
        with contextlib.suppress(OSError):
            found[pid] = processor_seconds(pid)
    del found[os.getpid()]
    return found


def test_two_processes_against_one(tmp_path: Path) -> None:
    codec = tokenizers.load(MODEL_DIR)
    n = write_gym_file(tmp_path / "0.jsonl", codec, FILE) * (SIZE // FILE)
    codec.close()
    for copy in range(1, SIZE // FILE):
        shutil.copyfile(tmp_path / "0.jsonl", tmp_path / f"{copy}.jsonl")
    todo: Todo = {str(n): shard for n, shard in enumerate(cut_files([tmp_path]).shards)}
    ways: dict[str, Callable[[], Done]] = {
        "1 process": lambda: on_processes(todo, SETTINGS, 1),
        "2 processes": lambda: on_processes(todo, SETTINGS, 2),
        "a loop in 1": lambda: on_processes(todo, SETTINGS, 1, counted),
        "a loop in 2": lambda: on_processes(todo, SETTINGS, 2, counted),
    }
    if HAS_RAY:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        ways["ray, 2 CPUs"] = lambda: on_ray(todo, SETTINGS)
    rounds = [{name: measured(read) for name, read in ways.items()} for _ in range(TIMES)]
    print(
        f"\n{n:,} trajectories, {SIZE >> 20} MB, {len(todo)} shards; {TIMES} rounds, the median of each and its range"
    )
    for name in ways:
        one = "a loop in 1" if "loop" in name else "1 process"
        print(
            f"{name:12}  {_range([each[name][0] for each in rounds])} s by the clock, "
            f"{_range([each[one][0] / each[name][0] for each in rounds])} times as fast; "
            f"{_range([each[name][1] / each[one][1] for each in rounds])} times the processor seconds"
        )


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
