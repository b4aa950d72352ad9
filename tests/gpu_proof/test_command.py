import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.gpu_proof.report import BEGIN, END, write_report
from tests.conftest import ROOT


def gpu_proof(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "REDIS_URL")},
        "DJANGO_SETTINGS_MODULE": "inspector.settings",
        "INSPECTOR_DATA": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "manage.py", "gpu_proof", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.vllm
def test_it_proves_on_the_cpu_build(vllm_available: bool, tiny_tokenizer: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = gpu_proof(tmp_path, "--cpu", "--trajectories", "8", "--json", "--report", str(page))
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["passed"] and {one["name"] for one in result["verdicts"] if one["passed"]} >= {
        "demo: ids", "demo: tools", "demo: log-probabilities", "load: concurrency", "load: turns", "load: ids",
        "load: log-probabilities", "load: re-tokenized", "load: same work",
    }
    assert 6 <= result["load"]["peak_live"] <= 8
    assert result["load"]["ids"]["tokens_out"] == result["load"]["throughput"][-1]["tokens"]
    assert f"{result['load']['throughput'][0]['ratio']:.3f}" in page.read_text()
    # The later turns read what the earlier ones left in the cache.
    assert result["load"]["cached_tokens"] > 0


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = gpu_proof(tmp_path)
    assert done.returncode == 2
    assert "No NVIDIA GPU is visible" in done.stderr and not done.stdout


def test_a_senseless_number_is_refused(tmp_path: Path) -> None:
    assert gpu_proof(tmp_path, "--cpu", "--trajectories", "0").returncode == 2


RESULT = {
    "date": "2026-01-01 00:00 UTC",
    "versions": {"device": "a card", "vllm": "1"},
    "plans": {"shape": {"dtype": "bfloat16"}, "trajectories": 3, "rounds": 2},
    "parameters": 1000,
    "load": {
        "peak_live": 3,
        "throughput": [
            {"tokens": 10, "worker_tokens_per_second": 99.0, "bare_tokens_per_second": 100.0, "ratio": 0.99}
        ],
    },
    "verdicts": [{"name": "ids", "passed": False, "sentence": "One differs."}],
}


def test_the_result_goes_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_report(page, RESULT, "manage.py gpu_proof")
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "a card" in text and "0.990" in text and "| ids | FAILED | One differs. |" in text


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("mine\n")
    with pytest.raises(ValueError, match="between them"):
        write_report(page, RESULT, "manage.py gpu_proof")
    assert page.read_text() == "mine\n"


def test_the_committed_page_has_the_marks() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
