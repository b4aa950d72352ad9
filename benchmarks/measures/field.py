"""What the check says of public bug reports: ``python -m benchmarks.measures.field [--write docs/field.md]``."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.diagnose.kinds import title_of
from tests.conftest import corpus_folder
from tests.samples.field_cases import FieldAnswer, FieldCase, answer, field_cases

MAX_TEXT = 260
_VERDICTS = ("right", "partly", "silent", "alarm")
_HEAD = """\
# Public reports, and what the check says of them

Each report was rebuilt as a file from its public thread, and what a reader expects was written down before the check
ran. The rules were mended with these files at hand, so the counts are no forecast for other reports.
`python -m benchmarks.measures.field --write docs/field.md` writes this page. It reads files beside the corpus, which
are not part of the repository, and those of `tests/field/cases`.

*Right*: the check names the expected kind at the expected place, or reads a healthy file without an error or a
warning. *Partly*: it names another kind, or another one beside it. *Silent*: it names nothing. *Alarm*: an error or a
warning on a healthy file.
"""


def lines(answers: Sequence[tuple[FieldCase, FieldAnswer]]) -> Iterator[str]:
    """The page as Markdown, line by line."""
    yield _HEAD
    verdicts = Counter(answer.verdict for _, answer in answers)
    yield "| files | right | partly | silent | alarm |\n|---|---|---|---|---|"
    counts = " | ".join(str(verdicts[name]) for name in _VERDICTS)
    yield f"| {len(answers)} | {counts} |\n"
    own = [case for case, _ in answers if case.is_own]
    for what, cases in (
        ("reports", [case for case in own if case.kinds]), ("twins without the fault", [c for c in own if not c.kinds])
    ):
        first = Counter(case.at_first for case in cases)
        counted = ", ".join(f"{first[name]} {name}" for name in _VERDICTS)
        yield f"Before a rule was changed, the {len(cases)} {what} in `tests/field/cases` were: {counted}.\n"
    yield "| report | source | what happened | verdict | what the check says |\n|---|---|---|---|---|"
    for case, one in answers:
        cells = case.number, _cell(case.source), _cell(case.what), one.verdict, _cell(_first_sentences(one))
        yield f"| {' | '.join(cells)} |"


def _first_sentences(answer: FieldAnswer) -> str:
    notes = {Severity.INFO: " (a note)"}
    sentences = [
        f"{title_of(one.kind)}{notes.get(one.severity, '')}: {one.evidence}"
        for one in (placed.finding for placed in answer.findings[:2])
    ]
    return " ".join(sentences or answer.refusals[:1]) or "Nothing was found."


def _cell(text: str) -> str:
    plain = " ".join(text.split())
    if len(plain) > MAX_TEXT:
        plain = plain[:MAX_TEXT] + " ..."
    return "".join(f"\\{char}" if char in "\\|<>*_`[]" else char for char in plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the page. Exit status 1: a report is not answered right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page there")
    options = parser.parse_args(argv)
    answers = [(case, answer(case)) for case in field_cases(corpus_folder())]
    page = "\n".join(lines(answers)) + "\n"
    if options.write:
        options.write.write_text(page)
    else:
        sys.stdout.write(page)
    return int(any(one.verdict != "right" for _, one in answers))


if __name__ == "__main__":
    sys.exit(main())
