"""The GitHub Action, by running its steps, and the hooks of pre-commit, by running their commands."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_inspector.commands.main import groups, main
from tests.conftest import ROOT
from tests.samples.guard import CLEAN, PLAIN, REWRITES, lines_of

FOLDER = ROOT / ".github" / "actions" / "check"
ACTION = yaml.safe_load((FOLDER / "action.yml").read_text())
INSTALL, CHECK = ACTION["runs"]["steps"]
EXPRESSION = re.compile(r"\$\{\{ ([\w.-]+) \}\}")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs for PATH: ours from the checkout, and a Python that says what it was called with."""
    found = tmp_path / "bin"
    found.mkdir()
    ours = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m rollout_inspector.commands "$@"\n'
    for name, text in (("rollout-inspector", ours), ("python3", '#!/bin/sh\nprintf "%s\\n" "$@"\n')):
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    return found


def run(step: dict[str, Any], programs: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """A step as GitHub runs it: expressions stand in ``env`` alone."""
    values = {f"inputs.{name}": str(one["default"]) for name, one in ACTION["inputs"].items()}
    values |= {f"inputs.{name.replace('_', '-')}": value for name, value in inputs.items()}
    values["github.action_path"] = str(FOLDER)
    assert step["shell"] == "bash" and not EXPRESSION.search(step["run"])
    environment = {name: EXPRESSION.sub(lambda match: values[match[1]], text) for name, text in step["env"].items()}
    folder = programs.parent
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def outputs(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "output").read_text().splitlines())


def test_its_inputs_are_the_options_of_check_and_template() -> None:
    """Those that a workflow does not choose: where reports go, and in which form."""
    options = {
        action.option_strings[-1].removeprefix("--")
        for name in ("check", "template")
        for action in next(one for group in groups().values() for one in group if one.name == name).parser()._actions
        if action.option_strings
    }
    assert options - {"help", "format", "output", "also"} <= ACTION["inputs"].keys()


def test_it_installs_the_version_of_the_action(programs: Path) -> None:
    said = run(INSTALL, programs).stdout.splitlines()
    assert said[:3] == ["-m", "pip", "install"] and Path(said[-1]).resolve() == ROOT
    assert INSTALL["if"] == "inputs.install == 'true'" and ACTION["inputs"]["install"]["default"] == "true"


def test_rollouts_that_fail_are_annotated_summed_up_and_reported(programs: Path, tmp_path: Path) -> None:
    data = tmp_path / "data" / "deep"
    data.mkdir(parents=True)
    (data / "clean one.jsonl").write_text(lines_of(CLEAN))
    (data / "broken.jsonl").write_text(lines_of("observation_trained", "duplicate_call"))
    (tmp_path / "chat.jinja").write_text(PLAIN)
    assert main(["lock", str(tmp_path / "chat.jinja"), "-o", str(tmp_path / "templates.lock")]) == 0
    done = run(CHECK, programs, files="data/**/*.jsonl", lock="templates.lock", max_rate="row_not_sampled=0.5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "::error file=data/deep/broken.jsonl,line=1,title=" in done.stdout
    assert "::notice file=chat.jinja,title=rollout-inspector template::Passed" in done.stdout
    found = outputs(tmp_path)
    assert found["outcome"] == "failed"
    reports = tmp_path / found["reports"]
    assert json.loads((reports / "rollouts.json").read_text())["trajectories"] == 3
    assert json.loads((reports / "rollouts.sarif").read_text())["runs"][0]["results"]
    assert json.loads((reports / "templates.json").read_text())["outcome"] == "passed"
    summary = (tmp_path / "summary").read_text()
    assert "## Rollouts: failed" in summary and "## Chat templates: passed" in summary


def test_a_template_that_changed_fails_and_nothing_to_check_is_no_pass(programs: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(PLAIN)
    assert main(["lock", str(template), "-o", str(tmp_path / "templates.lock")]) == 0
    template.write_text(REWRITES)
    done = run(CHECK, programs, lock="templates.lock", templates="chat.jinja", files="$(touch${IFS}made);touch")
    assert done.returncode == 1 and "::error file=chat.jinja,line=3," in done.stdout  # worse than not decided
    assert "There is no file $(touch${IFS}made);touch" in done.stdout and not (tmp_path / "made").exists()
    assert "It changes the renders of" in (tmp_path / "summary").read_text()
    done = run(CHECK, programs)
    assert done.returncode == 2 and "Nothing to check" in done.stdout
    assert outputs(tmp_path)["outcome"] == "undecided"


def test_the_hooks_of_pre_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {
        one["id"].removeprefix("rollout-inspector-"): one
        for one in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    }
    monkeypatch.chdir(tmp_path)
    Path("clean.jsonl").write_text(lines_of(CLEAN))
    Path("broken.jsonl").write_text(lines_of("observation_trained"))
    Path("chat.jinja").write_text(PLAIN)
    Path("worse.jinja").write_text(REWRITES)

    def hook(name: str, *files: str) -> int:
        one = hooks[name]
        program, *arguments = one["entry"].split()
        assert program == "rollout-inspector" and one["language"] == "python"
        passed = [file for file in files if re.search(one["files"], file)]
        assert passed == list(files)
        return main([*arguments, *one.get("args", []), *(passed if one.get("pass_filenames", True) else [])])

    assert hook("check", "clean.jsonl") == 0 and hook("check", "clean.jsonl", "broken.jsonl") == 1
    assert hook("template", "chat.jinja") == 0 and hook("template", "chat.jinja", "worse.jinja") == 1
    assert hook("lock", "chat.jinja") == 2  # nothing is locked yet
    assert main(["lock", "chat.jinja", "-o", "templates.lock"]) == 0
    assert hook("lock", "chat.jinja") == 0
    Path("chat.jinja").write_text(REWRITES)
    assert hook("lock", "chat.jinja", "templates.lock") == 1
