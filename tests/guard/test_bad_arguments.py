"""What a user may name by mistake: each gets one sentence and status 2, and nothing is written or overwritten."""

import os
from pathlib import Path
from typing import Any

import pytest
from django.core.management.base import BaseCommand

from inspector.management.commands.serve import Command as ServeCommand
from rollout_inspector.commands.main import groups, main
from tests.samples.guard import CLEAN, PLAIN, lines_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(lines_of(CLEAN))
    Path("chat.jinja").write_text(PLAIN)
    Path("binary").write_bytes(b"\xff\x00\x01")
    Path("deep").write_text("[" * 100_000)
    Path("evil\x1b[31m\n").write_text("{}")
    Path("loop").symlink_to("loop")
    Path("folder").mkdir()
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", ""], "An argument is empty"),
        (["check", "a.jsonl", "--tokenizer", ""], "An argument is empty"),
        (["check", "a.jsonl", "--fail-on="], "--fail-on: It names nothing"),
        (["check", "a.jsonl", "--baseline", "binary"], "The baseline binary is not UTF-8 text (byte 0)"),
        (["check", "a.jsonl", "--baseline", "deep"], "The baseline deep is not JSON"),
        (["check", "a.jsonl", "--baseline", "folder"], "The baseline folder cannot be read: Is a directory"),
        (["check", "a.jsonl", "--baseline", "loop"], "The baseline loop cannot be read"),
        (["check", "a.jsonl", "--baseline", "/dev/zero"], "The baseline /dev/zero is larger than 64 MB"),
        (["check", "a.jsonl", "--baseline", "evil\x1b[31m\n"], "evil\\x1b[31m\\n is no report"),
        (["check", "a.jsonl", "--output", "./a.jsonl"], "--output ./a.jsonl: it is checked"),
        (["check", "a.jsonl", "--output", "folder"], "--output folder is a folder"),
        (["check", "a.jsonl", "--output", "no/x"], "no such folder"),
        (["check", "a.jsonl", "--output", "x", "--also", "sarif=x"], "another report goes there"),
        (["template", "--lock", "deep"], "The lock file deep is not JSON"),
        (["template", "--lock", "/dev/zero"], "larger than"),
        (["template", "loop"], "cannot be read"),
        (["template", "chat.jinja", "--output", "chat.jinja"], "it is checked"),
        (["lock", "loop", "-o", "x"], "cannot be read"),
        (["lock", "chat.jinja", "-o", "chat.jinja"], "it is the template"),
        (["lock", "chat.jinja", "-o", "folder"], "is a folder"),
        (["mend", "a.jsonl", "-o", "/dev/null"], "cannot be written"),
        (["mend", "loop", "-o", "x"], "There is no file loop"),
    ],
)
def test_it_is_a_sentence_and_nothing_is_written(arguments: list[str], words: str, folder: Path, capsys: Any) -> None:
    before = contents(folder)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.count("\n") == 1 and "\x1b" not in said.err + said.out
    assert contents(folder) == before


def test_a_report_may_go_to_a_device_and_leaves_nothing_beside_it(folder: Path) -> None:
    assert main(["check", "a.jsonl", "--output", "/dev/null"]) == 0
    assert not os.path.isfile("/dev/null") and not os.path.exists("/dev/null.part")
    Path("link").symlink_to("real.json")
    assert main(["check", "a.jsonl", "--format", "json", "--output", "link"]) == 0
    assert Path("link").is_symlink() and Path("real.json").read_text().startswith("{")
    assert not list(folder.glob("*.part"))


def test_serve_takes_the_options_of_manage_py(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    own, of_django = (command.create_parser("manage.py", "serve") for command in (ServeCommand(), BaseCommand()))
    more = set(own._option_string_actions) - set(of_django._option_string_actions)
    assert "--port" in more and not [option for option in more if option not in said]


def test_the_help_lists_every_command_and_the_version_is_said(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    commands = [command for group in groups().values() for command in group]
    names = {command.name for command in commands}
    assert all(f"    {command.name:18} {command.help}" in said for command in commands)
    assert all(command.help.endswith((".", "?")) for command in commands)
    assert {"check", "template", "lock", "audit", "push", "watch", "serve", "mcp", "mend", "import_audit"} <= names
    assert len(names) == len(commands) and all(f"{title}:" in said for title in groups())
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("rollout-inspector ")


def test_a_command_that_does_not_exist_is_a_sentence(capsys: Any) -> None:
    for arguments, words in ((["chek", "a.jsonl"], "no command 'chek'"), ([], "required: COMMAND")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["import_audit", "import-audit"])
def test_a_command_of_the_server_is_the_one_of_manage_py(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("django.core.management.execute_from_command_line", calls.append)
    assert main([name, "audit", "--json"]) == main(["manage", "migrate"]) == 0
    assert calls == [
        ["rollout-inspector", "import_audit", "audit", "--json"],
        ["rollout-inspector manage", "migrate"],
    ]
