"""Small changes of a chat template's text that a repair may be made of, the likeliest first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollouts.chat_templates.jinja_source.scan import FAR, Tag, scan

POSITION = re.compile(
    r"loop\.(last|first|index0?|revindex0?|length|nextitem|previtem)|last_\w*index|last_\w*(?:user|query|assistant)\w*"
    r"|\w*_index\b|messages\s*\[\s*-|messages\s*\|\s*length|messages\[loop|is_last|is_first"
)
"""Words of a test on where a message stands."""
REASONING = re.compile(r"reason|think", re.IGNORECASE)
_TEST = re.compile(r"loop\.(?:last|first)\b|[=!<>]=|[<>]|\b(?:not|is|in)\b")
"""In the value of a ``set``: it is a yes or a no."""
_WORD = re.compile(r"\b(and|or|if|else)\b")


@dataclass(frozen=True)
class Edit:
    """Replace ``template[start:stop]`` by ``text``."""

    start: int
    stop: int
    text: str
    line: int
    rank: tuple[int, ...]
    """Lower = tried earlier."""

    def apply(self, template: str) -> str:
        return template[: self.start] + self.text + template[self.stop :]


def _top_level(text: str) -> Iterator[tuple[int, int, str]]:
    """Offsets and text of the words ``and``, ``or``, ``if``, ``else`` outside of quotes and brackets."""
    depth, quote, position = 0, "", 0
    while position < len(text):
        char = text[position]
        if quote:
            if char == "\\":
                position += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0 and (found := _WORD.match(text, position)) and not text[position - 1 : position].isalnum():
            yield found.start(), found.end(), found.group()
            position = found.end()
            continue
        position += 1


def operands(text: str, offset: int) -> Iterator[tuple[int, int, int, int, str]]:
    """The operands of a condition, nested ones too: start, stop, the same with its joining word, that word."""
    words = [word for word in _top_level(text) if word[2] in ("and", "or")]
    if not words:
        stripped = text.strip()
        start = offset + len(text) - len(text.lstrip())
        if stripped.startswith("(") and stripped.endswith(")"):
            yield from operands(stripped[1:-1], start + 1)
        elif stripped.startswith("not "):
            yield from operands(stripped[4:], start + 4)
        return
    bounds = [0, *(edge for start, stop, _ in words for edge in (start, stop)), len(text)]
    for n in range(0, len(bounds), 2):
        part = text[bounds[n] : bounds[n + 1]]
        start = bounds[n] + len(part) - len(part.lstrip())
        stop = bounds[n + 1] - (len(part) - len(part.rstrip()))
        word = words[max(0, n // 2 - 1)][2]
        # Dropping the first operand takes the word after it along, any other the word before.
        wide = (start, bounds[2] + len(text[bounds[2] :]) - len(text[bounds[2] :].lstrip())) if n == 0 else (
            len(text[: words[n // 2 - 1][0]].rstrip()), stop
        )  # fmt: skip
        yield offset + start, offset + stop, offset + wide[0], offset + wide[1], word
        yield from operands(part, offset + bounds[n])


def _conditions(template: str, tag: Tag) -> Iterator[tuple[int, int]]:
    """Offsets of the conditions in a tag: the whole of an ``if``, and each inline ``... if C else ...``."""
    if tag.kind in ("if", "elif"):
        yield tag.body_start, tag.body_stop
        return
    if tag.kind not in ("set", "{{"):
        return
    body = tag.body(template)
    if tag.kind == "set":
        equals = body.find("=")
        if equals < 0:
            return
        base, body = tag.body_start + equals + 1, body[equals + 1 :]
        if _TEST.search(body) and POSITION.search(body) and not any(word[2] == "if" for word in _top_level(body)):
            yield base + len(body) - len(body.lstrip()), base + len(body.rstrip())
    else:
        base = tag.body_start
    yield from _inline(body, base)


def _inline(text: str, base: int) -> Iterator[tuple[int, int]]:
    words = list(_top_level(text))
    for n, (_, stop, word) in enumerate(words):
        if word != "if":
            continue
        end = next((start for start, _, later in words[n + 1 :] if later == "else"), len(text))
        part = text[stop:end]
        left = len(part) - len(part.lstrip())
        yield base + stop + left, base + end - (len(part) - len(part.rstrip()))
    for start, end in _brackets(text):
        yield from _inline(text[start:end], base + start)


def _brackets(text: str) -> Iterator[tuple[int, int]]:
    """Offsets inside each outermost pair of round brackets."""
    depth, opened, quote = 0, 0, ""
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "(":
            depth += 1
            opened = position + 1 if depth == 1 else opened
        elif char == ")":
            depth -= 1
            if depth == 0:
                yield opened, position


def edits(template: str, near: Mapping[int, int]) -> list[Edit]:
    """Changes of one condition each, the likeliest first; ``near`` is line -> distance (``tags.suspects``)."""
    found: dict[tuple[int, int, str], Edit] = {}

    def add(start: int, stop: int, text: str, line: int, kind: int, order: int) -> None:
        if template[start:stop].strip() != text and (start, stop, text) not in found:
            found[start, stop, text] = Edit(start, stop, text, line, (near.get(line, FAR), kind, order))

    for tag in scan(template):
        for start, stop in _conditions(template, tag):
            text = template[start:stop]
            line = template.count("\n", 0, start) + 1
            kind = _kind(text)
            add(start, stop, "true", line, kind, 0)
            add(start, stop, "false", line, kind, 1)
            for a, b, wide_a, wide_b, word in operands(text, start):
                small = _kind(template[a:b])
                if word == "and" and template[a:b] == "loop.last" and a == wide_a:
                    # At the last message what it was, true at those before.
                    add(a, wide_b, "not loop.last or ", line, max(kind, small), 5)
                add(wide_a, wide_b, "", line, max(kind, small), 2)
                add(a, b, "true", line, max(kind, small), 3)
                add(a, b, "false", line, max(kind, small), 4)
    return sorted(found.values(), key=lambda edit: edit.rank)


def _kind(condition: str) -> int:
    """How likely a condition breaks prefixes: it asks for a position, for reasoning, for something else."""
    return 0 if POSITION.search(condition) else 1 if REASONING.search(condition) else 2
