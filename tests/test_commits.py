"""Subjects of the newest commits are an order with a scope: ``gallery: load the training runs by a button``."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, missing

BASE = "88f811f2ee3019e38cc3023ff156bd66cf033fc4"
"""The last commit before the rule."""
MAX_LENGTH = 72
SUBJECT = re.compile(r"[\w/.,-]+: (\S+)")
ARTICLES = {"a", "an", "the"}
PAST = re.compile(
    "became|began|brought|built|came|chose|did|drew|fell|found|gave|got|grew|had|held|kept|knew|left|lost|made|met|ran|"
    "said|sent|spoke|stood|told|took|was|went|were|wrote"
)
ORDERS = re.compile(r".*(ss|us|eed)|bias|embed|shed|shred")
"""Words that end as the past or the third person does, and are an order."""


def fault(subject: str) -> str:
    """What is wrong with the subject of a commit; empty = nothing."""
    match = SUBJECT.match(subject)
    if match is None:
        return "has no scope"
    verb = match[1].lower().rstrip(",:;")
    if len(subject) > MAX_LENGTH:
        return f"has {len(subject)} characters, more than {MAX_LENGTH}"
    if verb in ARTICLES:
        return "begins with an article"
    if PAST.fullmatch(verb) or (verb.endswith(("ed", "s")) and not ORDERS.fullmatch(verb)):
        return f"says {verb}, which is no order"
    return ""


def subjects(folder: Path = ROOT) -> list[str]:
    """Subjects of the newest hundred commits after BASE, without merges. A shallow clone has some of them."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)

    newest = "HEAD" if git("cat-file", "-e", f"{BASE}^{{commit}}").returncode else f"{BASE}..HEAD"
    log = git("log", "--no-merges", "-100", "--format=%s", newest)
    if log.returncode:
        missing(f"git shows no history: {log.stderr.strip()}")
    return log.stdout.splitlines()


def test_the_newest_subjects_are_orders_with_a_scope() -> None:
    assert {subject: fault(subject) for subject in subjects() if fault(subject)} == {}


@pytest.mark.parametrize(
    "subject",
    [
        "gallery: load the training runs by a button", "tests/ops: pass the corpus by name",
        "jobs,models: embed one record", "guard: focus on the first error", "docs: need one page less",
        "x: " + "y" * 69,
    ],
)
def test_an_order_with_a_scope(subject: str) -> None:
    assert fault(subject) == ""


@pytest.mark.parametrize(
    "subject",
    [
        "A push asks the end of a run", "load the runs", "gallery:load the runs", "gallery: The runs are loaded",
        "gallery: loaded the runs", "gallery: loads the runs", "gallery: made it quick", "two words: load the runs",
        "gallery: a button loads them", "x: " + "y" * 70,
    ],
)
def test_what_is_no_order_with_a_scope(subject: str) -> None:
    assert fault(subject) != ""


def test_a_lost_history_fails_where_nothing_may_be_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match="history"):
        subjects(tmp_path)
