"""What GitHub reads: the workflow, which is green in a fork, and the forms of issues."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import PARTS, ROOT, corpus_folder

GITHUB = ROOT / ".github"
CHECKER = Path(sys.executable).with_name("check-jsonschema")


def workflow() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    return parsed


@pytest.mark.parametrize(
    ("schema", "folder"), [("github-workflows", "workflows"), ("github-issue-forms", "ISSUE_TEMPLATE")]
)
def test_what_github_reads_is_as_its_schema_says(schema: str, folder: str) -> None:
    paths = sorted((GITHUB / folder).glob("*.yml"))
    command = [CHECKER, "--builtin-schema", f"vendor.{schema}", *paths]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert paths and check.returncode == 0, check.stdout


def test_actions_are_pinned_by_hash_and_may_only_read() -> None:
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)
    assert workflow()["permissions"] == {"contents": "read"}


def test_a_fork_checks_everything_but_the_corpus() -> None:
    job = workflow()["jobs"]["check"]
    assert "if" not in job and "needs" not in job and "vars." not in str(job) and "secrets." not in str(job)
    assert job["env"] == {"INSPECTOR_TEST_CORPUS": "absent"} and job["steps"][-1] == {"run": ".ci/run"}
    assert job["steps"][0]["with"]["fetch-depth"] == 0  # the subjects of commits


def test_the_corpus_is_tested_where_it_is_configured() -> None:
    job = workflow()["jobs"]["corpus"]
    assert job["if"] == "vars.INSPECTOR_CORPUS != ''" and job["steps"][-1] == {"run": ".ci/run test-corpus"}
    assert job["env"] == {"INSPECTOR_CORPUS": "${{ vars.INSPECTOR_CORPUS }}"}
    assert 'exec make "${1:-test}"' in (ROOT / ".ci" / "run").read_text()
    recipe = re.search(r"^test-corpus:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None and "INSPECTOR_TEST_PART=corpus" in recipe[1] and "corpus" in PARTS


@pytest.mark.parametrize(
    ("ci", "absent", "outcome"),
    [
        ("true", "", pytest.fail.Exception), ("true", "absent", pytest.skip.Exception),
        ("true", "no", pytest.fail.Exception), ("", "", pytest.skip.Exception),
    ],
)
def test_only_the_word_absent_lets_ci_skip_what_needs_the_corpus(
    ci: str, absent: str, outcome: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("CI", ci), ("INSPECTOR_TEST_CORPUS", absent), ("INSPECTOR_CORPUS", str(tmp_path / "none"))):
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match="corpus"):
        corpus_folder()
    monkeypatch.setenv("INSPECTOR_CORPUS", str(tmp_path))
    assert corpus_folder() == tmp_path
