"""Files opened where they lie: 100,000 trajectories, made sparse, 100 GB apparent. First list, trajectory, memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from tests.conftest import ROOT
from tests.samples.formats import own_line

pytestmark = pytest.mark.bench
N = int(os.environ.get("BENCH_OPEN", "100000"))
FILES = 100
APART = 1_000_000
LOOK = """
import json, resource, sys, time
began = time.monotonic()
import rollout_inspector
run = rollout_inspector.open(sys.argv[1])
lines = run.trajectories[:50].to_dict()
first = time.monotonic() - began
row = run.trajectories[40].rows[0]
trajectory = time.monotonic() - began - first
run.index.is_read.wait(float(sys.argv[2]))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps({"first list s": first, "then a trajectory s": trajectory, "memory MB": memory}))
"""


def write_files(folder: Path, n: int) -> None:
    step = Step(ids_array(range(200)), ids_array(range(300)), np.full(300, -0.5, np.float32))
    for number in range(FILES):
        with (folder / f"step_{number}.jsonl").open("wb") as file:
            for k in range(n // FILES):
                file.seek(k * APART)
                file.write(own_line(Trajectory(f"{number}-{k}", (step,), reward=k % 2)))
            file.truncate(n // FILES * APART)


def test_open(tmp_path: Path) -> None:
    write_files(tmp_path, N)
    environment = {**os.environ, "ROLLOUT_INSPECTOR_CACHE": str(tmp_path / "cache")}
    began = time.monotonic()
    command = [sys.executable, "-m", "rollout_inspector", "open", str(tmp_path), "--json"]
    figures = json.loads(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout)
    seconds = time.monotonic() - began
    environment["ROLLOUT_INSPECTOR_CACHE"] = str(tmp_path / "other")
    command = [sys.executable, "-c", LOOK, str(tmp_path), "60"]
    looked = json.loads(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout)
    print(f"\nopen --json: {figures}, {seconds:.1f} s in all")
    print(f"from Python, with a new cache and 60 s of reading: {looked}")
    assert figures["trajectories"] == N
