"""Small changes of a chat template's text. A repair consists of such changes; the likeliest come first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from rollout_inspector.text.chat_templates.jinja_source.scan import FAR, scan
from rollout_inspector.text.chat_templates.jinja_source.tokens import Piece, Token, top_level

POSITION = re.compile(
    r"loop\.(last|first|index0?|revindex0?|length|nextitem|previtem)|last_\w*index|last_\w*(?:user|query|assistant)\w*"
    r"|\w*_index\b|messages\s*\[\s*-|messages\s*\|\s*length|messages\[loop|is_last|is_first"
)
"""Words of a test on where a message stands."""
REASONING = re.compile(r"reason|think", re.IGNORECASE)
_TEST = re.compile(r"loop\.(?:last|first)\b|[=!<>]=|[<>]|\b(?:not|is|in)\b")
"""In the value of a ``set``: the value is true or false."""


Span = tuple[int, int]


def operands(tokens: Sequence[Token]) -> Iterator[tuple[Span, Span, str]]:
    """The operands of the ``and`` and ``or`` of a condition, nested ones too: offsets in the template. An operand, the
    same with the word that joins it (behind the first operand, before any other), and that word."""
    joints = [n for n in top_level(tokens) if tokens[n].text in ("and", "or")]
    if not joints:
        if tokens and not top_level(tokens) and (tokens[0].text, tokens[-1].text) == ("(", ")"):
            yield from operands(tokens[1:-1])
        elif tokens and tokens[0].text == "not":
            yield from operands(tokens[1:])
        return
    for before, after in pairwise([-1, *joints, len(tokens)]):
        part = tokens[before + 1 : after]
        start, stop = part[0].start, part[-1].stop
        if before < 0:
            yield (start, stop), (start, tokens[after + 1].start), tokens[after].text
        else:
            yield (start, stop), (tokens[before - 1].stop, stop), tokens[before].text
        yield from operands(part)


def _conditions(tag: Piece) -> Iterator[Sequence[Token]]:
    """The conditions in a tag: the whole of an ``if``, and each inline ``... if C else ...``."""
    tokens = tag.expression
    if tag.kind in ("if", "elif"):
        yield tokens
    elif tag.kind == "set":
        equals = next((n for n, token in enumerate(tokens) if token.text == "="), len(tokens))
        tokens = tokens[equals + 1 :]
        text = tag.text(tokens)
        if _TEST.search(text) and POSITION.search(text) and not any(tokens[n].text == "if" for n in top_level(tokens)):
            yield tokens
        yield from _inline(tokens)
    elif tag.kind == "output":
        yield from _inline(tokens)


def _inline(tokens: Sequence[Token]) -> Iterator[Sequence[Token]]:
    plain = top_level(tokens)
    for n in plain:
        if tokens[n].text == "if":
            yield tokens[n + 1 : next((m for m in plain if m > n and tokens[m].text == "else"), len(tokens))]
    depth = opened = 0
    for n, token in enumerate(tokens):
        if token.text == "(":
            depth += 1
            opened = n if depth == 1 else opened
        elif token.text == ")":
            depth -= 1
            if depth == 0:
                yield from _inline(tokens[opened + 1 : n])


def edits(template: str, near: Mapping[int, int]) -> list[tuple[tuple[int, int, int], int, int, str]]:
    """Changes of one condition each, the likeliest first; ``near`` is line -> distance (``scan.suspects``). The rank,
    which begins with the distance of the line; then ``start``, ``stop``, ``text``: what replaces that range."""
    ranks: dict[tuple[int, int, str], tuple[int, int, int]] = {}

    def add(start: int, stop: int, text: str, line: int, kind: int, order: int) -> None:
        if template[start:stop].strip() != text and (start, stop, text) not in ranks:
            ranks[start, stop, text] = near.get(line, FAR), kind, order

    for tag in scan(template):
        for condition in filter(None, _conditions(tag)):
            start, stop = condition[0].start, condition[-1].stop
            line = tag.line + template.count("\n", tag.start, start)
            kind = _kind(template[start:stop])
            add(start, stop, "true", line, kind, 0)
            add(start, stop, "false", line, kind, 1)
            for operand, joined, word in operands(condition):
                text = template[slice(*operand)]
                small = max(kind, _kind(text))
                if word == "and" and text == "loop.last" and operand[0] == joined[0]:
                    # Unchanged at the last message, true at the messages before it.
                    add(*joined, "not loop.last or ", line, small, 5)
                add(*joined, "", line, small, 2)
                add(*operand, "true", line, small, 3)
                add(*operand, "false", line, small, 4)
    return [(ranks[edit], *edit) for edit in sorted(ranks, key=ranks.__getitem__)]


def _kind(condition: str) -> int:
    """How likely a condition breaks prefixes: 0 = it asks for a position, 1 = for reasoning, 2 = for something else."""
    return 0 if POSITION.search(condition) else 1 if REASONING.search(condition) else 2
