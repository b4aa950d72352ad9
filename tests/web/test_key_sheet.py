"""The key sheets are true: a script handles every key that they list, and they list every key that a script handles."""

import re

import pytest
from django.conf import settings

LISTED = re.compile(r"<kbd>([^<]+)</kbd>")
ENTRY = re.compile(r'^ +"?([^\s":]+)"?:', re.MULTILINE)
# Keys that no table holds: the browser, a dialog or the arrows' code handles them.
OUTSIDE_THE_TABLE = {"g", "Enter", "Shift", "Esc"}


def keys_listed(*templates: str) -> set[str]:
    """The keys on the lines of a sheet that hold a term."""
    text = "\n".join((settings.BASE_DIR / "templates" / name).read_text() for name in templates)
    return {key for line in text.splitlines() if "<dt>" in line for key in LISTED.findall(line)}


def keys_handled(script: str, start: str) -> set[str]:
    """The keys of the object that begins with `start` in a script."""
    text = (settings.BASE_DIR / "static" / "js" / script).read_text()
    assert text.count(start) == 1, f"{script} has no single {start!r}"
    before, after = text.split(start)
    indent = before.rpartition("\n")[2]
    table = after.split(f"\n{indent}}}")[0]
    return set(ENTRY.findall(table))


SHEETS = [
    ("tokens.js", "const KEYS = {", ("trajectories/_keys.html",)),
    (
        "trajectory_frame.js",
        "const action = {",
        ("trajectories/frame.html", "trajectories/compare.html", "trajectories/record.html"),
    ),
]


@pytest.mark.parametrize(("script", "start", "templates"), SHEETS, ids=["tokens", "other tabs"])
def test_a_sheet_lists_the_keys_that_its_script_handles(script: str, start: str, templates: tuple[str, ...]) -> None:
    handled = keys_handled(script, start)
    assert len(handled) > 7
    assert keys_listed(*templates) - OUTSIDE_THE_TABLE == handled


def test_every_script_leaves_the_keys_after_g_that_all_pages_have() -> None:
    scripts = settings.BASE_DIR / "static" / "js"
    places = re.search(r"const place = \{(.+?)\}\[event\.key\]", (scripts / "app.js").read_text())
    assert places is not None
    letters = set(re.findall(r"(\w): \"/", places[1]))
    assert keys_listed("partials/common_keys.html") - {"?", "g", "Esc", "Ctrl", "K"} == letters
    for name in ("tokens.js", "trajectory_frame.js"):
        left = re.search(r'"(\w+)"\.includes\(event\.key\)', (scripts / name).read_text())
        assert left is not None and set(left[1]) == letters, name
