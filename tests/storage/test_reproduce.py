"""A finding as a script: it reproduces every kind of the stream and of the delta that can be planted."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from rollouts.reproduce import CannotReproduce, script
from rollouts.tito.diagnose import KINDS, Axis, Finding, Severity, diagnose
from rollouts.tito.trajectory import Row, Step, Trajectory, ids_array
from tests.tito.plant import planted
from tests.tito.worlds import tokenizer_folder, world

FOLDERS = {
    "toggling": ("bytes", "<|shut|>"), "stable": ("bytes", "<|shut|>"), "bare": ("bytes", "<|end|>"),
    "headers": ("bytes", "<|user|>"), "pieces": ("pieces", "<|shut|>"),
}  # fmt: skip


def run(text: str, tmp_path: Path) -> str:
    path = tmp_path / "finding.py"
    path.write_text(text, encoding="ascii")
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(path))
    return said.getvalue()


def test_every_planted_kind_is_reproduced_by_its_script(tmp_path: Path) -> None:
    done: set[str] = set()
    for name, folder in FOLDERS.items():
        w = world(name)
        for case in planted(w, 1):
            if case.kind is None or case.kind in done:
                continue
            found = diagnose(case.trajectory, w.codec, lambda sha, w=w: w.renderer)
            finding = next(f for f in found if f.kind in (case.kind, *case.also) and f.step == case.step)
            text = script(finding, case.trajectory, tokenizer=str(tokenizer_folder(*folder)), chat_template="{{ 1 }}")
            said = run(text, tmp_path)
            assert f"Reproduced: {finding.evidence}"[:40] in said, case.name
            done.add(case.kind)
    wanted = {slug for slug, kind in KINDS.items() if kind.axis != "row"} - {"unclassified", "not_decidable"}
    assert wanted - done == set()


def broken() -> tuple[Finding, Trajectory]:
    first = Step(ids_array([1, 2]), ids_array([3, 4]))
    second = Step(ids_array([1, 2, 3, 9, 5]), ids_array([6]))
    evidence = 'Sampled """ and \\ and \u202e and a\nline.'
    finding = Finding(
        Axis.STREAM, "boundary_merge", Severity.ERROR, step=1, start=3, stop=4, expected_ids=ids_array([4]),
        actual_ids=ids_array([9]), evidence=evidence,
    )  # fmt: skip
    return finding, Trajectory('t"""\n1', (first, second))


def test_a_process_of_its_own_reproduces_it_and_hostile_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "finding.py"
    path.write_text(script(*broken()), encoding="ascii")
    ended = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "Reproduced: Sampled" in ended.stdout, ended.stderr


def test_the_script_of_a_mended_trajectory_fails(tmp_path: Path) -> None:
    text = script(*broken())
    mended = re.sub(r"PROMPT = .*", "PROMPT = [1, 2, 3, 4, 5]", text)
    assert mended != text
    with pytest.raises(AssertionError):
        run(mended, tmp_path)


@pytest.mark.parametrize(
    ("kind", "mask", "logprobs"),
    [
        ("observation_trained", [0, 1, 1], [0, -1, -1]),
        ("sampled_masked", [0, 0, 1], [0, -1, -1]),
        ("mask_overrun", [1, 1, 1], [-1, -1, -1]),
        ("length_mismatch", [0, 1, 1], [0, -1]),
        ("logprob_invalid", [0, 1, 1], [0, float("nan"), -1]),
    ],
)
def test_faults_of_rows_are_reproduced_and_fail_once_mended(
    kind: str, mask: list[int], logprobs: list[float], tmp_path: Path
) -> None:
    row = Row(ids_array([1, 2, 3]), np.array(mask, dtype=bool), np.array(logprobs, dtype=np.float32))
    finding = Finding(Axis.ROW, kind, Severity.ERROR, row=0, start=1, stop=2, evidence="It is so.")
    text = script(finding, Trajectory("t", rows=(row,)))
    assert "Reproduced: It is so." in run(text, tmp_path)
    sound = "0" if kind == "observation_trained" else "1"
    mended = re.sub(r"LOSS_MASK = .*", f"LOSS_MASK = [0, {sound}, 1]", text)
    mended = re.sub(r"LOGPROBS = .*", "LOGPROBS = [0.0, -1.0, -1.0]", mended)
    with pytest.raises(AssertionError):
        run(mended, tmp_path)


def test_what_cannot_be_asserted_is_refused() -> None:
    finding = Finding(Axis.STREAM, "not_decidable", Severity.INFO, step=0, missing="tokenizer")
    with pytest.raises(CannotReproduce, match="not_decidable"):
        script(finding, Trajectory("t", (Step(ids_array([1]), ids_array([2])),)))
