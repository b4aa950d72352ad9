"""Where the tags of a chat template stand: which condition guards a line, and what the template reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout_inspector.text.chat_templates.jinja_source.tokens import Piece, Token, pieces

_COMMON = frozenset(
    {"and", "or", "not", "is", "in", "if", "else", "true", "false", "none", "defined", "loop", "string"}
)
_READS_ID = re.compile(r"\b(?:tool_call_)?id\b")
FAR = 9
"""The distance of a line that has no visible connection with a difference."""


def scan(template: str) -> list[Piece]:
    """All statements and outputs of a template, in order."""
    return [piece for piece in pieces(template) if piece.tokens and piece.kind != "comment"]


@dataclass(frozen=True)
class Branch:
    """A branch of a condition: from its ``if``, ``elif`` or ``else`` to the tag that ends it."""

    condition: Piece
    opened_by: Piece
    """The ``if`` that the branch belongs to; the same tag for its first branch."""
    first_line: int
    last_line: int

    def holds(self, line: int | None) -> bool:
        """Whether a line of the template, 1-based, stands in the branch."""
        return line is not None and self.first_line <= line <= self.last_line


def branches(template: str) -> Iterator[Branch]:
    """All branches of all conditions."""
    stack: list[tuple[Piece, Piece]] = []
    for tag in scan(template):
        if tag.kind in ("if", "for"):
            stack.append((tag, tag))
        elif tag.kind in ("elif", "else") and stack:
            opened_by, condition = stack.pop()
            yield Branch(condition, opened_by, condition.line, tag.line)
            stack.append((opened_by, tag))
        elif tag.kind in ("endif", "endfor") and stack:
            opened_by, condition = stack.pop()
            if opened_by.kind == "if":
                yield Branch(condition, opened_by, condition.line, tag.line)


def deciding_condition(template: str, one: int | None, other: int | None) -> Piece | None:
    """The innermost condition that guards one of two lines and not the other: the likeliest cause of a difference.

    ``one`` and ``other``: 1-based lines of the template, None = not known. Returns None where there is none.
    """
    if one is None or other is None:
        return None
    for line, against in ((one, other), (other, one)):
        guarding = [branch for branch in branches(template) if branch.holds(line) and not branch.holds(against)]
        if guarding:
            innermost = min(guarding, key=lambda branch: branch.last_line - branch.first_line)
            return innermost.opened_by if innermost.condition.kind == "else" else innermost.condition
    return None


def suspects(template: str, pairs: Iterable[tuple[int | None, int | None]]) -> dict[int, int]:
    """Lines that can have caused differences between what two lines wrote: 1-based line -> distance from the cause.

    Distance 0: the two lines, and each condition that guards one of them and not the other.
    Distance 1: the lines that set a name that these conditions read, and what guards these lines.
    Distance 2 and more: the same from there on.
    """
    tags, known = scan(template), list(branches(template))
    chains: dict[Piece, set[int]] = {}
    for branch in known:
        chains.setdefault(branch.opened_by, set()).add(branch.condition.line)
    found: dict[int, int] = {}
    near: set[int] = set()
    for one, other in pairs:
        for line, against in ((one, other), (other, one)):
            if line is None:
                continue
            near.add(line)
            for branch in known:
                if branch.holds(line) and not branch.holds(against):
                    near |= chains[branch.opened_by]
    for distance in range(4):
        for line in near:
            found.setdefault(line, distance)
        names = {
            name
            for tag in tags
            if tag.line in near and tag.kind in ("if", "elif", "set", "output", "for")
            for name in _names(tag.expression)
        }
        sets = [tag for tag in tags if tag.kind == "set" and next(_names(tag.expression), "") in names]
        near = {tag.line for tag in sets}
        for tag in sets:
            for branch in known:
                if branch.holds(tag.line):
                    near |= chains[branch.opened_by]
        near -= found.keys()
    return found


def _names(tokens: Sequence[Token]) -> Iterator[str]:
    """The names that an expression reads, each with its first attribute: ``ns.x``."""
    for n, token in enumerate(tokens):
        if token.kind == "name" and token.text not in _COMMON and tokens[max(n - 1, 0)].text != ".":
            has_attribute = [after.text for after in tokens[n + 1 : n + 2]] == ["."]
            yield "".join(part.text for part in tokens[n : n + 3]) if has_attribute else token.text


def wants_call_ids(template: str) -> bool:
    """Whether a chat template reads the ids of calls, so that a call without one may be refused."""
    return any(_READS_ID.search(piece.source) for piece in pieces(template) if piece.kind != "comment")


def line_text(template: str, line: int | None) -> str:
    """A line of the template, 1-based, without white space around it; empty when there is none."""
    lines = template.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""
