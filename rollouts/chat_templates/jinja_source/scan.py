"""Where a chat template's tags stand in its text: which condition guards a line, and what a repair may rewrite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPENING = re.compile(r"\{%|\{\{|\{#")
_TAG = re.compile(r"\{%[-+]?\s*(\w+)")
_NAME = re.compile(r"(?<![\w.'\"])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?")
_COMMON = frozenset(
    {"and", "or", "not", "is", "in", "if", "else", "true", "false", "none", "defined", "loop", "string"}
)
FAR = 9
"""The distance of a line that has nothing to do with a difference, as far as the text of the template tells."""


@dataclass(frozen=True)
class Tag:
    """One ``{% ... %}`` or ``{{ ... }}``."""

    kind: str
    """The tag's first word: ``if``, ``elif``, ``for``, ``set``, ...; ``{{`` for an output."""
    start: int
    """Offset of its opening brace in the template."""
    stop: int
    """Offset after its closing brace."""
    body_start: int
    """Offsets of what follows the first word, spaces around it excluded."""
    body_stop: int
    line: int

    def body(self, template: str) -> str:
        return template[self.body_start : self.body_stop]

    def source(self, template: str) -> str:
        return template[self.start : self.stop]


def tag_end(template: str, start: int, closing: str) -> int:
    """The offset after a tag's closing brace; quoted text inside may hold one that does not count."""
    position, quote = start, ""
    while position < len(template):
        char = template[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif template.startswith(closing, position):
            return position + 2
        position += 1
    return len(template)


def scan(template: str) -> list[Tag]:
    """All tags and outputs in order; comments are left out, as is what a malformed end hides."""
    tags = []
    position = 0
    while (opening := OPENING.search(template, position)) is not None:
        start = opening.start()
        if opening.group() == "{#":
            end = template.find("#}", start)
            position = len(template) if end < 0 else end + 2
            continue
        position = tag_end(template, start + 2, "%}" if opening.group() == "{%" else "}}")
        named = _TAG.match(template, start)
        if opening.group() == "{%" and named is None:
            continue
        body_start = named.end() if named is not None and opening.group() == "{%" else start + 2
        body_stop = position - 2
        if template[body_stop - 1] in "-+":
            body_stop -= 1
        text = template[body_start:body_stop]
        if opening.group() == "{{" and text[:1] in "-+":
            body_start, text = body_start + 1, text[1:]
        body_start += len(text) - len(text.lstrip())
        body_stop -= len(text) - len(text.rstrip())
        kind = named.group(1) if named is not None and opening.group() == "{%" else "{{"
        line = template.count("\n", 0, start) + 1
        tags.append(Tag(kind, start, position, body_start, max(body_start, body_stop), line))
    return tags


@dataclass(frozen=True)
class Branch:
    """A branch of a condition: from its ``if``, ``elif`` or ``else`` to the tag that ends it."""

    condition: Tag
    opened_by: Tag
    """The ``if`` that the branch belongs to; the same tag for its first branch."""
    first_line: int
    last_line: int


def branches(template: str) -> Iterator[Branch]:
    """All branches of all conditions."""
    stack: list[tuple[Tag, Tag]] = []
    for tag in scan(template):
        if tag.kind == "if":
            stack.append((tag, tag))
        elif tag.kind in ("elif", "else") and stack:
            opened_by, condition = stack.pop()
            yield Branch(condition, opened_by, condition.line, tag.line)
            stack.append((opened_by, tag))
        elif tag.kind == "for":
            stack.append((tag, tag))
        elif tag.kind in ("endif", "endfor") and stack:
            opened_by, condition = stack.pop()
            if opened_by.kind == "if":
                yield Branch(condition, opened_by, condition.line, tag.line)


def deciding_condition(template: str, one: int | None, other: int | None) -> Tag | None:
    """The innermost condition that guards one of two lines and not the other: the likeliest cause of a difference."""
    if one is None or other is None or one == other:
        return None
    for line, against in ((one, other), (other, one)):
        guarding = [b for b in branches(template) if b.first_line <= line <= b.last_line]
        guarding = [b for b in guarding if not b.first_line <= against <= b.last_line]
        if guarding:
            innermost = min(guarding, key=lambda branch: branch.last_line - branch.first_line)
            return innermost.opened_by if innermost.condition.kind == "else" else innermost.condition
    return None


def suspects(template: str, pairs: Iterable[tuple[int | None, int | None]]) -> dict[int, int]:
    """Lines that can have caused differences between what two lines wrote: 1-based line -> distance from the cause.

    0: the two lines themselves, and each condition that guards one of them and not the other. 1 and more: the lines
    that set a name which those conditions read, and what guards these, step by step.
    """
    tags, known = scan(template), list(branches(template))
    chains: dict[Tag, set[int]] = {}
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
                if _holds(branch, line) and not _holds(branch, against):
                    near |= chains[branch.opened_by]
    for distance in range(4):
        for line in near:
            found.setdefault(line, distance)
        names = {
            name
            for tag in tags
            if tag.line in near and tag.kind in ("if", "elif", "set", "{{", "for")
            for name in _NAME.findall(tag.body(template))
            if name not in _COMMON
        }
        sets = [tag for tag in tags if tag.kind == "set" and tag.body(template).partition("=")[0].strip() in names]
        near = {tag.line for tag in sets}
        for tag in sets:
            for branch in known:
                if _holds(branch, tag.line):
                    near |= chains[branch.opened_by]
        near -= found.keys()
    return found


def _holds(branch: Branch, line: int | None) -> bool:
    return line is not None and branch.first_line <= line <= branch.last_line


def line_text(template: str, line: int | None) -> str:
    """A line of the template, 1-based, without white space around it; empty when there is none."""
    lines = template.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""
