"""Public bug reports, rebuilt as files, and what the check says of each. They stand in ``review/field-cases`` beside
the corpus, and in ``tests/field/cases``."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rollout_inspector.commands.tokenizer_options import load_renderer, load_tokenizer
from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.guard.checked_files import CheckedFiles, PlacedFinding, check_files
from rollout_inspector.streams.interfaces import Renderer
from rollout_inspector.text.tokenizers import LoadedTokenizer

_OWN = Path(__file__).parent.parent / "field" / "cases"
_STANDS_FOR = {"<media>": "media_tokens_wrong"}
_MUST_BE_READ = "<format>"


@dataclass(frozen=True)
class FieldCase:
    """One report: its file, where it was reported and which kinds of finding name it."""

    slug: str
    source: str
    what: str
    expectation: str
    """What a reader of the report would expect, in words."""
    kinds: frozenset[str]
    """Any of these is right; none = a healthy file. ``<format>`` = the file must be read."""
    fine: frozenset[str]
    place: str
    """``step 1``, ``row 0, offset 28`` or nothing."""
    paths: tuple[Path, ...]
    options: tuple[str, ...]
    at_first: str
    """The verdict before any rule was mended with the file at hand."""

    @property
    def is_own(self) -> bool:
        """Whether its file is part of the repository."""
        return _OWN in self.paths[0].parents

    @property
    def number(self) -> str:
        return self.slug.split("-")[0]


@dataclass(frozen=True)
class FieldAnswer:
    """What the check says of a case."""

    verdict: str
    """``right``, ``partly`` (another kind, or another beside it), ``silent`` or ``alarm`` (on a healthy file)."""
    findings: tuple[PlacedFinding, ...]
    refusals: tuple[str, ...]


def field_cases(corpus: Path) -> list[FieldCase]:
    """The cases in the folder beside the corpus and in the repository, by number."""
    paths = [*corpus.parent.glob("review/field-cases/*/case.json"), *_OWN.glob("*/case.json")]
    cases = [_case(path.parent, corpus) for path in paths]
    return sorted(cases, key=lambda case: (int("".join(filter(str.isdecimal, case.number))), case.slug))


def _case(folder: Path, corpus: Path) -> FieldCase:
    facts = json.loads((folder / "case.json").read_text())
    return FieldCase(
        folder.name, facts["source"], facts["what"], facts["expected"],
        frozenset(_STANDS_FOR.get(kind, kind) for kind in facts["expected_kinds"]), frozenset(facts["also_fine"]),
        facts.get("expected_place") or "", tuple(folder / name for name in facts["files"]),
        tuple(option.format(corpus=corpus, case=folder) for option in facts["options"]),
        facts["verdict"],
    )


@cache
def _model(options: tuple[str, ...]) -> tuple[LoadedTokenizer | None, Renderer | None]:
    by_name = dict(zip(options[::2], options[1::2], strict=True))
    tokenizer = load_tokenizer(by_name.get("--tokenizer"))
    return tokenizer, load_renderer(tokenizer, by_name.get("--chat-template"))


def answer(case: FieldCase) -> FieldAnswer:
    """Checks the files of a case as ``rollout-inspector check`` does."""
    tokenizer, renderer = _model(case.options)
    checked = check_files(case.paths, tokenizer, renderer)
    findings = tuple(one for one in checked.found if _counts(one, case))
    return FieldAnswer(_verdict(case, checked, findings), findings, tuple(one.reason for one in checked.unread))


def _counts(one: PlacedFinding, case: FieldCase) -> bool:
    return one.finding.severity is not Severity.INFO or one.finding.kind in case.kinds


def _verdict(case: FieldCase, checked: CheckedFiles, findings: tuple[PlacedFinding, ...]) -> str:
    if _MUST_BE_READ in case.kinds:
        may_be_refused = "refus" in case.expectation and not checked.n_trajectories
        return "right" if bool(checked.unread) == may_be_refused else "silent"
    if checked.unread:
        return "silent"
    wrong = [one for one in findings if one.finding.kind not in case.kinds | case.fine]
    if not case.kinds:
        return "alarm" if wrong else "right"
    if any(one.finding.kind in case.kinds and _stands_at(one, case.place) for one in findings):
        return "partly" if wrong else "right"
    return "partly" if findings else "silent"


def _stands_at(one: PlacedFinding, place: str) -> bool:
    if not place:
        return True
    where = one.finding
    step_or_row, _, offset = place.partition(", offset ")
    at = {f"step {where.step}", f"row {where.row}"}
    return step_or_row in at and (not offset or where.start <= int(offset) <= max(where.stop, where.start))
