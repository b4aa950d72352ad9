"""How much faster two processes audit than one: the same files, by turns. With ray, a cluster of two CPUs as well."""

import contextlib
import importlib.util
import math
import os
import shutil
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from rollouts import tokenizers
from rollouts.demo_policy import MODEL_DIR
from rollouts.guard.audit_runners import Done, Todo, on_processes, on_ray
from rollouts.guard.shard_audit import AuditSettings, cut_files
from tests.bench.gym_file import write_gym_file
from tests.bench.processes import family, processor_seconds

pytestmark = pytest.mark.bench
SIZE = int(os.environ.get("BENCH_AUDIT_MB", "128")) << 20
FILE = min(SIZE, 64 << 20)
"""Bytes of each file; all hold the same."""
TIMES = int(os.environ.get("BENCH_AUDIT_TIMES", "3"))
SETTINGS = AuditSettings(str(MODEL_DIR))


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
    }
    if importlib.util.find_spec("ray"):
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        ways["ray, 2 CPUs"] = lambda: on_ray(todo, SETTINGS)
    clock: dict[str, float] = {}
    spent: dict[str, float] = {}
    for _, (name, read) in product(range(TIMES), ways.items()):
        by_clock, of_processor = measured(read)
        clock[name], spent[name] = (
            min(by_clock, clock.get(name, math.inf)),
            min(of_processor, spent.get(name, math.inf)),
        )
    print(f"\n{n:,} trajectories, {SIZE >> 20} MB, {len(todo)} shards; the best of {TIMES}")
    for name, seconds in clock.items():
        n = 1 if name == "1 process" else 2
        print(
            f"{name:12}  {seconds:7.2f} s  {clock['1 process'] / seconds:5.2f}  {SIZE / 1e6 / seconds:6.1f} MB/s  "
            f"processor {spent[name]:7.2f} s, so at most {n * spent['1 process'] / spent[name]:5.2f} on free cores"
        )
