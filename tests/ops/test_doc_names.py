"""Every file and module that a page of the documentation or a comment names is there."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.samples.product import source_files

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted(path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts)
FOLDERS = ("rollout_inspector", "rollouts", "inspector", "tools", "tests", "benchmarks", "templates", "static", "docs")
PLACE = re.compile(rf"(?<![\w./@:-])((?:{'|'.join(FOLDERS)})/[\w./*{{}}-]*)")
DOTTED = re.compile(r"(?<![\w./-])((?:rollout_inspector|rollouts|inspector|tools)(?:\.\w+)+)(?![\w/*]|-\w)")
RETIRED = re.compile(r"`(?:services|selectors|tasks|work|tito)\.\w[\w.]*`")
"""Rooms that there were before the three houses."""
OTHERS = re.compile(r"\.(jsonl|json|parquet|sarif|pt|md|lock|sqlite3|example)$|^inspector\.([EW]\d+|audit|request)$")
"""Files of a user, host names, the codes of checks and the names of logs look like modules."""


@cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module, or a name inside one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            return length == len(parts) or bool(re.search(rf"\b{parts[length]}\b", source.read_text(encoding="utf-8")))
        if path.is_dir():
            return length == len(parts)
    return False


def wrong_names(text: str) -> list[str]:
    """The places and modules of a text that do not exist; NAME stands for what a reader adds."""
    places = {place.rstrip("./") for place in PLACE.findall(text)}
    places = {place for place in places if not re.search(r"NAME|[{]|^rollouts/[*]|^tests/data|jsonl$", place)}
    modules = {name for name in DOTTED.findall(text) if not OTHERS.search(name)}
    missing = [place for place in places if not any((*ROOT.glob(place), *ROOT.glob(f"{place}-*.md")))]
    return sorted([*RETIRED.findall(text), *missing, *(name for name in modules if not is_module(name))])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    assert wrong_names(page.read_text(encoding="utf-8")) == []


def test_what_the_source_names_is_there() -> None:
    wrong = {}
    for path in source_files():
        comments = re.findall(r'"""(?:.|\n)*?"""|#.*', path.read_text(encoding="utf-8"))
        if "migrations" not in path.parts and (names := wrong_names("\n".join(comments))):
            wrong[path.relative_to(ROOT).as_posix()] = names
    assert wrong == {}


def test_a_wrong_name_would_be_found() -> None:
    assert wrong_names("`services.jobs`") and not wrong_names("`jobs.py`, `tasks`")
    assert wrong_names("`rollouts/tito/prefix.py` and `rollouts.tito.prefix`, `inspector.settings.NO_SUCH`")
    assert not wrong_names("`rollouts/store/models/`, `inspector.settings.DEBUG`, `rollouts.jsonl`, `tests/NAME.py`")
