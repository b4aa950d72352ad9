"""The table of what the five texts ask: every row is held by tests that exist, or answered by a decision."""

import ast
import re
from functools import cache

from tests.conftest import ROOT

LINE = re.compile(r"^\| (\d+) \| (.+?) \| (\w+) \|(.*)\|$", re.MULTILINE)
N_ROWS = 70
PARTLY: set[int] = set()
"""Rows that no test holds as a whole. The set only becomes smaller."""


@cache
def names_of(path: str) -> frozenset[str]:
    """The tests of a module; those of a class as ``Class.test``."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        names |= {before + one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return frozenset(name for name in names if name.rpartition(".")[2].startswith("test_"))


def faults(page: str) -> list[str]:
    """What is wrong with a table: rows out of order, statuses without their proof, tests that do not exist."""
    rows = LINE.findall(page)
    wrong = [] if [int(number) for number, *_ in rows] == list(range(1, N_ROWS + 1)) else ["the numbers"]
    for number, _, status, proof in rows:
        tests = re.findall(r"`(tests/\S+?)::(\S+?)`", proof)
        decisions = re.findall(r"\(decisions/(\S+?)\)", proof)
        wrong += [f"{number}: {path}::{name}" for path, name in tests if name not in names_of(path)]
        wrong += [f"{number}: {name}" for name in decisions if not (ROOT / "docs/decisions" / name).is_file()]
        fits = {"done": bool(tests), "decided": bool(decisions), "partly": int(number) in PARTLY and not tests}
        wrong += [] if fits.get(status) else [f"{number}: {status}"]
    return wrong


def test_every_row_is_held_or_answered() -> None:
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    assert faults(page) == []
    assert {int(number) for number, _, status, _ in LINE.findall(page) if status == "partly"} == PARTLY


def test_a_row_without_its_proof_would_be_found() -> None:
    page = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    assert faults(page.replace("test_single_turns_are_sampled_as_one_batch", "test_of_nothing")) == [
        "9: tests/loop/test_loop.py::test_of_nothing"
    ]
    assert faults(page.replace("decisions/0052", "decisions/9952")) != []
    assert faults(re.sub(r"(?m)^\| 30 .*\n", "", page)) == ["the numbers"]
