"""``rollout-inspector template`` and ``lock``: exit statuses, what changed, and which line did it."""

import json
import shutil
from pathlib import Path

import pytest

from rollout_inspector.commands.main import main
from rollout_inspector.guard.template_lock import read_lock
from tests.samples.guard import DEAF, PLAIN, REWRITES


def run(*arguments: str | Path) -> int:
    return main([*map(str, arguments)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "chat_template.jinja"
    found.write_text(PLAIN)
    return found


@pytest.fixture
def lock(path: Path) -> Path:
    found = path.with_name("templates.lock")
    assert run("lock", path, "-o", found) == 0
    return found


def compared(path: Path, lock: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    capsys.readouterr()
    status = run("template", path, "--lock", lock, "--format", "json", *arguments)
    (found,) = json.loads(capsys.readouterr().out)["templates"]
    return status, found["lock"]


@pytest.mark.parametrize(
    ("text", "arguments", "status", "said"),
    [
        (PLAIN, [], 0, "Passed: safe."),
        (REWRITES, [], 1, "Decided on line 3: "),
        (DEAF, [], 2, "Not decided: TITO with tool results: not available: The renders agree only because the call"),
        (DEAF, ["--for", "users"], 0, "Passed: safe."),
        (DEAF, ["--for", "users,tools"], 2, "the pass is void"),
        ("{% if %}", [], 2, "syntax error on line 1"),
    ],
)
def test_a_template_passes_fails_or_is_not_decided(
    path: Path, text: str, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(text)
    assert run("template", path, *arguments) == status
    assert said in capsys.readouterr().out


def test_the_template_of_a_tokenizer_is_checked_as_tokens(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("template", tiny_tokenizer, "--format", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["templates"]
    assert found["tokenizer_sha256"] and found["prefix_preserving"] is True
    # The ids of the renders are locked too: another tokenizer, or none, is told.
    folder, lock = tmp_path / "policy", tmp_path / "lock"
    shutil.copytree(tiny_tokenizer, folder)
    assert run("lock", folder, "-o", lock) == 0
    assert run("template", folder, "--lock", lock) == 0
    template = (folder / "chat_template.jinja").read_bytes()
    shutil.rmtree(folder)
    folder.write_bytes(template)
    capsys.readouterr()
    assert run("template", folder, "--lock", lock) == 2
    assert "is checked with no tokenizer" in capsys.readouterr().out


def test_what_was_locked_passes_and_a_known_fault_is_said(
    path: Path, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("template", path, "--lock", lock) == 0
    assert run("template", "--lock", lock) == 0  # the templates that the lock names
    path.write_text(REWRITES)
    assert run("lock", path, "-o", lock) == 0
    capsys.readouterr()
    assert run("template", path, "--lock", lock) == 0
    assert "Known since it was locked: TITO with tool results: not safe" in capsys.readouterr().out
    path.write_text(DEAF)
    assert run("lock", path, "-o", lock) == 0
    assert run("template", path, "--lock", lock) == 2  # a void pass is none, locked or not


def test_the_line_that_did_it_is_named(path: Path, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comment = "{#- the form of ChatML #}\n"
    path.write_text(comment + REWRITES)
    status, found = compared(path, lock, capsys)
    assert status == 1
    first, second = found["lines"]
    assert (first["first"], first["last"], second["first"]) == (4, 4, 1)  # it did it; the comment did nothing
    assert "A tool result after a call" in first["probes"] and second["probes"] == []
    assert "It changes no render." in second["sentence"] and "loop.last" in first["sentence"]
    changes = " ".join(found["changes"])
    assert "TITO with tool results: safe became not safe." in changes and "sha256" in changes
    assert "ok before, now broken" in changes and "The renders of" in changes
    assert run("template", path, "--lock", lock, "--format", "github") == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"::error file={path},line=4,") and said[1].startswith(f"::notice file={path},line=1,")


def test_a_change_without_any_effect_still_is_one(path: Path, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("{#- new #}\n" + PLAIN)
    status, found = compared(path, lock, capsys)
    assert status == 1 and len(found["changes"]) == 1 and found["lines"][0]["probes"] == []


def test_lines_that_do_it_together_are_told_by_what_they_write(
    path: Path, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("{%- set mark = '!' %}\n" + PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ mark }}"))
    status, found = compared(path, lock, capsys)
    assert status == 1 and not any(line["probes"] for line in found["lines"])
    assert "No changed line does it alone." in found["changes"][-1] and "Line 4 writes it" in found["changes"][-1]
    # Half a block alone is no template.
    path.write_text(
        PLAIN.replace("<|im_start|>{{", "{% if m.role %}<|im_start|>{{").replace("{%- endfor", "{% endif %}{% endfor")
    )
    status, found = compared(path, lock, capsys)
    assert status == 1 and not any(line["is_tried"] for line in found["lines"])


def test_a_template_that_breaks_fails(path: Path, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(PLAIN.replace("{%- endfor %}", ""))
    status, found = compared(path, lock, capsys)
    assert status == 1 and "cannot be rendered" in found["changes"][0]


def test_renders_that_differ_without_a_change_of_the_template(
    path: Path, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = json.loads(lock.read_text())
    (entry,) = value["templates"].values()
    entry["renders"]["user_append"] = "0" * 64
    lock.write_text(json.dumps({**value, "jinja": "2.0"}))
    status, found = compared(path, lock, capsys)
    assert status == 1 and "“A user message after an answer”" in found["changes"][0]
    assert found["notes"][0].startswith("The template is the same; Jinja 2.0 became")
    lock.write_text(json.dumps({**value, "checks_version": 1}))
    status, found = compared(path, lock, capsys)
    assert status == 2 and "Write the lock again." in found["notes"][-1]


def test_a_clock_does_not_change_the_lock(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}" + PLAIN)
    lock = path.with_name("lock")
    assert run("lock", path, "-o", lock) == 0
    assert run("template", path, "--lock", lock) == 0


def test_what_cannot_be_used_is_a_sentence(path: Path, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = path.with_name("other.jinja")
    other.write_text(PLAIN)
    good = lock.read_text()
    broken = json.loads(good)
    broken["templates"][path.name]["template"][0] = "{#"
    nothing = path.with_name("nothing.lock")
    (path.parent / "empty").mkdir()
    (text,) = (one.text for one in read_lock(lock).templates.values())
    assert text == PLAIN
    for written, said in [
        ("[]", "no lock file"),
        ("{", "not JSON"),
        (json.dumps(broken), "is broken at"),
        ("\0", "not JSON"),
    ]:
        lock.write_text(written)
        assert run("template", path, "--lock", lock) == 2
        assert said in capsys.readouterr().err
    lock.write_text(good)
    for arguments, said in [
        (["template"], "Name a template"),
        (["template", path, "--for", "poems"], "There is no purpose 'poems'"),
        (["template", path.with_name("none")], "cannot be read: No such file"),
        (["template", path.parent / "empty"], "is no tokenizer's folder, and no file below it ends in .jinja"),
        (["template", path, "--lock", nothing], "cannot be read: No such file"),
        (["lock", path, path, "-o", nothing], "are one template"),
        (["lock", path, "-o", path.parent / "no" / "lock"], "there is no such folder"),
    ]:
        assert run(*arguments) == 2, arguments
        assert said in capsys.readouterr().err, arguments
    other.write_text("{% if %}")
    assert run("lock", other, "-o", nothing) == 2 and not nothing.exists()
    assert run("template", other, "--lock", lock) == 2  # nobody locked it
