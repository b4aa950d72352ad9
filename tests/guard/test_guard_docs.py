"""Every example of the pages of the guard works as it stands there, one after the other, in one folder."""

import configparser
import glob
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rollout_inspector.commands.main import main
from rollout_inspector.guard import Guard
from rollout_inspector.text.tokenizers import load
from tests.conftest import ROOT
from tests.samples.guard import CLEAN, GOOD, PLAIN, lines_of

PAGES = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("guard", "guard-in-a-trainer")]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", "\n".join(PAGES), re.DOTALL)
TESTS, IN_A_TRAINER = (text for language, text in BLOCKS if language == "python")
FIXTURES = """
import pytest
from rollout_inspector.text.tokenizers import load
from tests.samples.guard import GOOD

@pytest.fixture
def made_rows():
    return [GOOD]

@pytest.fixture
def tokenizer():
    return load("models/policy")
"""


def commands() -> Iterator[list[str]]:
    """The command lines, with their patterns as a shell expands them."""
    for language, text in BLOCKS:
        if language == "sh":
            for line in text.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["rollout-inspector"]:
                    yield [found for word in words[1:] for found in (sorted(glob.glob(word)) or [word])]


def test_the_examples(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("rollouts", "outputs", "prompts", "tests/data", "data", "models"):
        Path(folder).mkdir(parents=True)
    shutil.copytree(tiny_tokenizer, "models/policy")
    for template in ("chat_template.jinja", "prompts/chat_template.jinja"):
        Path(template).write_text(PLAIN)
    for file in ("rollouts/a.jsonl", "outputs/step_1.jsonl", "known.jsonl", "new.jsonl", "data/a.jsonl",
                 "tests/data/rollouts.jsonl"):
        Path(file).write_text(lines_of(CLEAN))
    lines = list(commands())
    assert len(lines) >= 9 and {line[0] for line in lines} == {"check", "template", "lock"}
    for line in lines:
        assert main(line) == 0, line
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    action = yaml.safe_load((ROOT / ".github" / "actions" / "check" / "action.yml").read_text())
    uses, repositories = (yaml.safe_load(text) for language, text in BLOCKS if language == "yaml")
    (step,) = (step for step in uses if step.get("id") == "rollouts")
    assert step["with"].keys() <= action["inputs"].keys()
    for hook in repositories[0]["hooks"]:
        entry = hooks[hook["id"]]
        files = [] if not entry.get("pass_filenames", True) else (
            ["prompts/chat_template.jinja"] if hook["id"].endswith("template") else ["tests/data/rollouts.jsonl"]
        )
        arguments = hook.get("args", entry.get("args", []))
        assert main([*shlex.split(entry["entry"])[1:], *arguments, *files]) == 0, hook
    Path("test_examples.py").write_text(TESTS)
    Path("conftest.py").write_text(FIXTURES)
    (settings,) = (text for language, text in BLOCKS if language == "ini")
    Path("pytest.ini").write_text(settings)
    assert configparser.ConfigParser().read("pytest.ini")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "rollout_inspector.guard.pytest_plugin", "-p", "no:django", "-q", "-rA",
         "-p", "no:cacheprovider"],
        env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=300,
    )
    assert "5 passed" in done.stdout and done.returncode == 0, done.stdout
    logged: list[dict[str, Any]] = []
    names = {"Guard": Guard, "tokenizer": load("models/policy"), "batch": [GOOD], "calls": [], "wandb": SimpleNamespace(
        log=logged.append)}
    exec(IN_A_TRAINER, names)
    assert logged and len(names["batch"]) == 1  # type: ignore[arg-type]
