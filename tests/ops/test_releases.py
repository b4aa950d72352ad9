"""What a release promises: its version, its upgrade notes, and which commands and pages are experimental."""

import re
import tomllib

from rollout_inspector.commands.main import groups
from tests.conftest import ROOT

PROMISE = (ROOT / "docs/compatibility.md").read_text()
EXPERIMENTAL = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| (`.+`) \|$", PROMISE, re.MULTILINE)
"""(page, its commands in backticks)."""
NOTE = re.compile(r"^> Experimental: .*\(compatibility\.md\)", re.MULTILINE)


def test_the_changelog_begins_with_this_version_and_its_upgrade():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    assert re.match(rf"{re.escape(version)} - (\d{{4}}-\d\d-\d\d|unreleased)\n", newest)
    assert "### Upgrade\n" in newest


def test_an_experimental_page_says_so_and_no_other_does():
    said = {path.name for path in (ROOT / "docs").glob("*.md") if NOTE.search(path.read_text())}
    assert said == {page for page, _ in EXPERIMENTAL} and len(said) == 4


def test_each_experimental_command_is_one():
    commands = {command.name for group in groups().values() for command in group}
    named = {name for _, names in EXPERIMENTAL for name in re.findall(r"`(\w+)`", names)}
    assert named <= commands and {"fork", "damage", "open", "gauntlet"} <= named
