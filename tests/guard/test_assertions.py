"""``assert_tito``, ``assert_template_safe`` and the pytest plugin: what passes, what fails, what the failure says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.commands.main import main
from rollout_inspector.guard.assertions import assert_template_safe, assert_tito
from rollout_inspector.guard.template_lock import read_lock
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.tokenizers import load
from tests.conftest import ROOT
from tests.samples.guard import BAD, CLEAN, DEAF, GOOD, PLAIN, REWRITES, lines_of


def test_rows_files_and_lines_that_can_be_trained_on(tmp_path: Path) -> None:
    clean, broken = tmp_path / "clean.jsonl", tmp_path / "broken.jsonl"
    clean.write_text(lines_of(CLEAN))
    broken.write_text(lines_of(CLEAN, "observation_trained"))
    assert_tito(clean)
    assert_tito([str(clean), clean])
    assert_tito(json.loads(line) for line in clean.read_text().splitlines())
    assert_tito([GOOD])
    assert_tito({"ids": np.stack([GOOD.ids]), "loss_mask": [GOOD.loss_mask], "logprobs": [GOOD.logprobs]})
    assert_tito(broken, max_rate=["observation_trained=0.5"])
    assert_tito(broken, fail_on="none")
    with pytest.raises(AssertionError) as failed:
        assert_tito(broken)
    said = str(failed.value)
    assert f"{broken}:2: observation_trained, row 0, tokens" in said and "Remedy: " in said
    assert "Failed by observation_trained." in said
    with pytest.raises(AssertionError, match=r"rows: row-1, row 0, tokens"):
        assert_tito([GOOD, BAD])
    lines = [json.loads(line) for line in broken.read_text().splitlines()]
    with pytest.raises(AssertionError, match="Failed by observation_trained"):
        assert_tito(lines)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "No trajectory could be read."),
        ("/nowhere.jsonl", "There is no file"),
        ([{"x": 1}], "no token ids: its fields are x"),
        ([GOOD, 5], "1 line or file was not read"),
    ],
)
def test_what_is_not_decided_is_no_pass(rows: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        assert_tito(rows)


def test_a_template_is_safe_or_says_why(tiny_tokenizer: Path, tmp_path: Path) -> None:
    assert_template_safe(tiny_tokenizer)
    assert_template_safe(None, PLAIN)
    assert_template_safe(chat_template=DEAF, purposes="users")
    with pytest.raises(AssertionError, match="Decided on line 3: "):
        assert_template_safe(chat_template=REWRITES)
    with pytest.raises(AssertionError, match="the pass is void"):
        assert_template_safe(chat_template=DEAF)
    path, lock = tmp_path / "chat.jinja", tmp_path / "lock"
    path.write_text(PLAIN)
    assert main(["lock", str(path), "-o", str(lock)]) == 0
    assert_template_safe(chat_template=path, lock=lock)
    with pytest.raises(AssertionError, match="The lock file has no template other"):
        assert_template_safe(chat_template=path, lock=lock, name="other")
    path.write_text(REWRITES)
    with pytest.raises(AssertionError, match=r"Line 3: .* It changes the renders of"):
        assert_template_safe(chat_template=path, lock=lock)
    with pytest.raises(Refusal, match="There is no chat template"):
        assert_template_safe()
    with pytest.raises(Refusal, match="cannot be read: No such file"):
        assert_template_safe(chat_template="chat_of_nobody.jinja")


def test_a_lock_knows_what_was_locked_by_its_path(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = tmp_path / "hub"
    shutil.copytree(tiny_tokenizer, hub / "blobs")
    (tmp_path / "repo" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repo")
    Path("models/policy").symlink_to(hub / "blobs")  # as the cache of the hub makes it: the name is the one given
    Path("chat.jinja").write_text(PLAIN)
    assert main(["lock", "models/policy", "chat.jinja", "-o", "all.lock", "--tokenizer", "models/policy"]) == 0
    assert sorted(read_lock("all.lock").templates) == ["chat.jinja", "models/policy"]
    assert_template_safe("models/policy", lock="all.lock")
    assert_template_safe(chat_template="chat.jinja", lock="all.lock")  # with the tokenizer of the lock
    assert_template_safe(load(tiny_tokenizer), lock="all.lock", name="models/policy")
    assert main(["template", "--lock", "all.lock"]) == 0 and main(["template", "chat.jinja", "--lock", "all.lock"]) == 0
    with pytest.raises(AssertionError, match=r"this is\. It has: chat\.jinja, models/policy"):
        assert_template_safe(load(tiny_tokenizer), lock="all.lock")
    capsys.readouterr()
    assert main(["lock", "../hub/blobs", "-o", "out.lock"]) == 2 and not Path("out.lock").exists()
    assert f"folder above both, such as {tmp_path}." in capsys.readouterr().err
    assert main(["template", "../hub/blobs", "--lock", "all.lock"]) == 2


def test_the_plugin_makes_tests_of_files_and_locks(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntito_files = data/c*.jsonl data/b*.jsonl\ntito_locks = *.lock\n")
    data = tmp_path / "data"
    data.mkdir()
    (data / "clean.jsonl").write_text(lines_of(CLEAN))
    (data / "broken.jsonl").write_text(lines_of("observation_trained"))
    (data / "other.json").write_text("{}")
    template, lock = tmp_path / "chat.jinja", tmp_path / "templates.lock"
    template.write_text(PLAIN)
    assert main(["lock", str(template), "-o", str(lock)]) == 0
    template.write_text(REWRITES)
    (tmp_path / "broken.lock").write_text("{}")
    (tmp_path / "test_rows.py").write_text(
        "from rollout_inspector.guard import assert_tito\n\ndef test_rows() -> None:\n    assert_tito([{'x': 1}])\n"
    )
    plugins = ["-p", "rollout_inspector.guard.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:django"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", "-rA", "--continue-on-collection-errors", str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120,
    )
    said = done.stdout
    assert "1 passed" in said and "3 failed" in said and "1 error" in said, said
    assert "PASSED data/clean.jsonl::tito" in said and "FAILED data/broken.jsonl::tito" in said
    assert "Failed by observation_trained." in said and "FAILED templates.lock::chat.jinja" in said
    assert "became '{{ m.content }}{% if loop.last %}" in said and "is no lock file of version 1" in said
    assert "no token ids: its fields are x" in said
    assert "rollout_inspector/guard" not in said  # no traceback of ours
