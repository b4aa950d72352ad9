"""Every command line that a page of the documentation shows is one that its command takes."""

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class

from rollout_inspector.commands.main import Command, groups
from tests.conftest import ROOT

COMMANDS: dict[str, Command] = {command.name: command for group in groups().values() for command in group}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(
    r"(?:^|[|;&(]\s*)(?:[A-Z_]+=\S+ )*(rollout-inspector|(?:\S*python3? )?manage\.py) ([^|;&#)\n]+)", re.MULTILINE
)


def command_lines(text: str) -> list[tuple[str, list[str]]]:
    """(program, arguments) of each line of a block of code that starts one of our commands."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    found = [one for block in blocks for one in LINE.findall(block.replace("\\\n", " "))]
    return [(program.rsplit(" ", 1)[-1], shlex.split(rest)) for program, rest in found]


def parser_of(program: str, name: str) -> ArgumentParser:
    command = COMMANDS.get(name.replace("-", "_"))
    if program == "manage.py" or (command is not None and command.needs_server):
        name = name if command is None else command.name
        return load_command_class(get_commands()[name], name).create_parser(program, name)
    assert command is not None, f"there is no rollout-inspector {name}"
    return command.parser()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program, (name, *arguments) in command_lines(page.read_text(encoding="utf-8")):
        try:
            parser_of(program, name).parse_args(arguments)
        except SystemExit as end:
            assert not end.code, f"{program} {name} {shlex.join(arguments)}: {capsys.readouterr().err}"


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    ((program, (name, *arguments)),) = command_lines("```sh\nA=b rollout-inspector watch DIR --never # why\n```\n")
    with pytest.raises(SystemExit):
        parser_of(program, name).parse_args(arguments)
