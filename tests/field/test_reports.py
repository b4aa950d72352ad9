"""Public bug reports, rebuilt as files before anybody saw what the rules say of them, are named right."""

from pathlib import Path

from benchmarks.measures.field import lines
from tests.conftest import ROOT
from tests.samples.field_cases import answer, field_cases


def test_every_report_is_answered_right(corpus: Path) -> None:
    answers = [(case, answer(case)) for case in field_cases(corpus)]
    assert len(answers) >= 125
    wrong = {case.number for case, one in answers if one.verdict != "right"}
    assert wrong == set()
    counts = f"| {len(answers)} | {len(answers) - len(wrong)} | "
    assert counts in "\n".join(lines(answers)) and counts in (ROOT / "docs" / "field.md").read_text(encoding="utf-8")
