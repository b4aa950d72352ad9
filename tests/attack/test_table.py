"""The table of attacks names every item of the review, and every test that it names exists."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
LAST = {"H": 5, "M": 12, "L": 19, "T": 8, "N": 4, "F": 6}
ITEMS = [f"{letter}{n}" for letter, last in LAST.items() for n in range(1, last + 1)]


def rows() -> dict[str, list[str]]:
    """Item -> attack, expectation and tests."""
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    items = [line for line in lines if re.match(r"\| [HMLTNF]\d", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in items]
    assert all(len(row) == 4 for row in cells)
    return {row[0]: row[1:] for row in cells}


def functions_of(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_item_of_the_review_has_a_line() -> None:
    assert list(rows()) == ITEMS


def test_every_test_of_the_table_exists() -> None:
    missing, n = [], 0
    for item, (_, _, named) in rows().items():
        file = ""
        for name in re.findall(r"`([^`]+)`", named):
            if name.endswith(".py"):
                file = name
                continue
            n += 1
            if name not in functions_of(file):
                missing.append(f"{item}: {file}::{name}")
        assert file, f"{item} names no test"
    assert missing == [] and n > len(ITEMS)
