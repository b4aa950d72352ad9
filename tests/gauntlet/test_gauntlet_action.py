"""The action of GitHub, by running its script as a runner does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

ACTION = yaml.safe_load((ROOT / ".github" / "actions" / "gauntlet" / "action.yml").read_text())
STEP = ACTION["runs"]["steps"][-1]
EXPRESSION = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")


@pytest.mark.parametrize(("start", "status", "words"), [
    ("{python} -m tests.gauntlet.proxy {{engine}} {{port}} {folder}", 0, "No property is broken."),
    ("{python} -c $(touch${{IFS}}made) {{engine}} {{port}}", 2, "did not listen"),
])
def test_a_gateway_is_tested_and_summed_up(tmp_path: Path, start: str, status: int, words: str) -> None:
    program = tmp_path / "rollout-inspector"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m rollout_inspector.commands "$@"\n')
    program.chmod(0o755)
    captured = tmp_path / "captured"
    captured.mkdir()
    values = {name: str(field.get("default", "")) for name, field in ACTION["inputs"].items()}
    values |= {"start": start.format(python=sys.executable, folder=captured), "captured": str(captured)}
    environment = {name: EXPRESSION.sub(lambda match: values[match[1]], text) for name, text in STEP["env"].items()}
    assert STEP["shell"] == "bash" and "${{" not in STEP["run"]
    ran = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEP["run"]], cwd=tmp_path, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), **environment},
        capture_output=True, timeout=120, check=False,
    )
    assert ran.returncode == status and words in ran.stdout, ran.stdout + ran.stderr
    assert words in (tmp_path / "summary").read_text()
    assert (tmp_path / "gauntlet.xml").is_file() == (status == 0) and not (tmp_path / "made").exists()
