"""How fast the guard is: tokens a second of one core in a trainer, and ``check`` against the import of the same file.

Seconds are processor seconds of this process and of its tokenizers.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_import import MB, import_file, seconds, tokenizer_folders
from benchmarks.gym_file import write_gym_file
from rollout_inspector import formats
from rollout_inspector.commands.main import main
from rollout_inspector.formats import Source
from rollout_inspector.guard import Guard
from rollout_inspector.streams.prefix import links_of, merge_steps
from rollout_inspector.streams.trajectory import Row, Trajectory
from rollout_inspector.text.tokenizers import load
from rollouts.store.chat_templates.tokenizers import find_tokenizer, load_tokenizer
from rollouts.store.runs.runs import delete_run
from tests.conftest import ROOT

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]
SIZE = int(os.environ.get("BENCH_GUARD_MB", "25")) * MB
TIMES = 3
PER_CALL = 64


def rows_of(trajectory: Trajectory) -> list[Row]:
    """The rows that follow from the steps: all that was sampled is trained."""
    found = []
    for chain in merge_steps(trajectory.steps, links_of(trajectory)):
        stream = trajectory.steps[chain[-1]].stream
        mask, logprobs = np.zeros(len(stream), dtype=np.bool_), np.full(len(stream), np.nan, dtype=np.float32)
        for index in chain:
            step = trajectory.steps[index]
            place = slice(len(step.prompt_ids), len(step.prompt_ids) + len(step.completion_ids))
            mask[place] = True
            logprobs[place] = step.logprobs
        found.append(Row(stream, mask, logprobs))
    return found


def guarded(guard: Guard, name: str, items: list[Any]) -> None:
    for start in range(0, len(items), PER_CALL):
        getattr(guard, name)(items[start : start + PER_CALL])


def test_tokens_a_second(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    print("\ntokenizer  what   sample  M tokens/s  looked at  slowest call, ms")
    for folder in tokenizer_folders(corpus, tiny_tokenizer):
        codec = load_tokenizer(find_tokenizer(str(folder)).files_sha256)
        path = tmp_path / f"{folder.name}.jsonl"
        write_gym_file(path, codec, SIZE)
        trajectories = [one for one in formats.read(Source.of_path(path))[1] if isinstance(one, Trajectory)]
        rows = [row for one in trajectories for row in rows_of(one)]
        for name, items in (("rows", rows), ("steps", trajectories)):
            for sample in (1.0, 0.05):
                best = 0.0
                for _ in range(TIMES):
                    guard = Guard(codec, sample=sample, max_seconds=60, fail_on="none", seed=1)
                    took, _ = seconds(lambda: guarded(guard, name, items))  # noqa: B023
                    found = guard.counters()
                    best = max(best, found["tokens_seen"] / took / 1e6)
                print(
                    f"{folder.name:9}  {name:5}  {sample:6}  {best:10.2f}  {found['checked']:5} of {found['seen']:5}"
                    f"  {1000 * found['slowest_seconds']:.0f}"
                )


def test_check_against_import(corpus: Path, tiny_tokenizer: Path, tmp_path: Path) -> None:
    print("\ntokenizer  import, s  check, s  check / import")
    for folder in tokenizer_folders(corpus, tiny_tokenizer):
        codec = load_tokenizer(find_tokenizer(str(folder)).files_sha256)
        path, report = tmp_path / f"{folder.name}.jsonl", tmp_path / "report.json"
        n = write_gym_file(path, codec, SIZE)
        options = ["--tokenizer", str(codec.path), "--format", "json", "--output", str(report), "--fail-on", "none"]
        imports, checks = [], []
        for _ in range(TIMES):
            took, run = seconds(lambda: import_file(path, folder))  # noqa: B023
            imports.append(took)
            delete_run(run)
            took, status = seconds(lambda: main(["check", str(path), *options]))  # noqa: B023
            checks.append(took)
            assert status == 0 and json.loads(report.read_text())["trajectories"] == n
        one, other = min(imports), min(checks)
        print(f"{folder.name:9}  {one:9.2f}  {other:8.2f}  {other / one:.2f}")


LOADS = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1] + '/tokenizer.json')"


def by_the_clock(*command: str) -> float:
    """Seconds of the fastest of several runs of a Python program."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        ended = subprocess.run([sys.executable, *command], check=False, capture_output=True, cwd=ROOT)
        took.append(time.perf_counter() - began)
        assert ended.returncode in (0, 1), ended.stderr  # 1: it found something
    return min(took)


def test_start_of_check(corpus: Path, tmp_path: Path) -> None:
    """One trajectory, beside a Python that only loads the tokenizer by the library ``tokenizers``."""
    print("\ntokenizer   check, s  only loaded, s  check / loaded")
    for name in ("qwen2.5", "llama3.1", "gpt-oss"):
        folder, path = str(corpus / "tokenizers" / name), tmp_path / f"{name}.jsonl"
        write_gym_file(path, load(folder), 1)
        check = by_the_clock("-m", "rollout_inspector", "check", "--tokenizer", folder, str(path))
        loaded = by_the_clock("-c", LOADS, folder)
        print(f"{name:10}  {check:8.2f}  {loaded:14.2f}  {check / loaded:14.2f}")
