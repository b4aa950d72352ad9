"""vLLM's Model Runner V2, which a GPU gets, passes the same tests as V1 on the CPU build.

It shows what the runner returns: tokens, log-probabilities, scores, seeds, versions, kept sets. It shows nothing of
speed, memory or compiled kernels, which ``make gpu-proof`` measures. The interpreter takes long, so the contract has a
part of its tests here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

pytestmark = pytest.mark.vllm
CHOICE = "test_vllm_tells or vllm and (facts or max_tokens or the_stop_token or a_seed or alternatives_are_told)"


def test_it_passes_what_the_runner_of_the_cpu_passes(vllm_available: bool) -> None:
    triton = Path(sys.prefix) / "triton"
    if not triton.is_dir():
        missing(f"{triton} lacks Triton (make test installs it on Linux)")
    files = ["tests/engines/test_vllm_tells.py", "tests/engines/test_contract.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.engines.runner_v2", "-p", "no:cacheprovider", *files,
         "-k", CHOICE],
        cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
        env={**os.environ, "PYTHONPATH": str(triton), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0 and "skipped" not in ended.stdout, ended.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= 10, ended.stdout  # type: ignore[index]
