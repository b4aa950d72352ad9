"""A chat template taken apart: its outputs, operand by operand, inside the blocks that hold them.

What a piece of constant text renders as depends on the tags beside it (``-``, ``trim_blocks``, ``lstrip_blocks``), so
each keeps both its source and the text that it writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rollouts.chat_templates.jinja_source.scan import OPENING, tag_end

_KIND = re.compile(r"\{%[-+]?\s*(\w+)")
_CAPTURES = {"macro", "call", "filter", "autoescape", "with", "block"}
_UNIT = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)|.", re.DOTALL)
_LOOSE = re.compile(r"\b(?:if|else|and|or|not|in|is)\b|[=<>!,*/%-]")
"""Outside of quotes and brackets: an operator that binds looser than a concatenation, or may be arithmetic."""


class CannotTakeApart(Exception):
    """The template has a construct that this module does not follow; the message names it."""


@dataclass(eq=False)
class Operand:
    """A part of an output that is written at once: an expression, or constant text."""

    source: str
    """Of an expression its text, quotes included; of constant text between two tags what it writes."""
    text: str | None = None
    """What a constant writes; None = an expression."""
    joiner: str = ""
    """``+`` or ``~`` before it, in an output of several operands."""
    name: int = -1


@dataclass(eq=False)
class Leaf:
    """A tag, a comment, an output or constant text."""

    kind: str
    """``out``, ``data``, ``comment``, ``opaque`` (a macro, a captured block), else the first word of a statement."""
    source: str
    operands: list[Operand] = field(default_factory=list)
    """Of ``out`` and ``data``; empty for constant text that writes nothing."""
    opening: str = ""
    closing: str = ""
    """The braces of a tag, with their ``-`` or ``+``."""
    body: str = ""
    """What stands between them."""
    line: int = 0
    """1-based; 0 = not known."""
    is_cut: bool = False
    """Its operands are no longer those of its source."""


@dataclass(eq=False)
class TemplateSection:
    head: Leaf
    children: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class BranchGroup:
    """A condition with its branches, or a loop."""

    kind: str
    sections: list[TemplateSection]
    tail: Leaf | None = None


Node = Leaf | BranchGroup


def take_apart(template: str) -> list[Node]:
    """The template as a tree; generation tags of its own become comments. Raises :class:`CannotTakeApart`."""
    root: list[Node] = []
    open_groups: list[BranchGroup] = []
    leaves = _joined(list(_leaves(template)))
    for leaf in leaves:
        place = open_groups[-1].sections[-1].children if open_groups else root
        if leaf.kind in ("if", "for"):
            group = BranchGroup(leaf.kind, [TemplateSection(leaf)])
            place.append(group)
            open_groups.append(group)
        elif leaf.kind in ("elif", "else") and open_groups:
            open_groups[-1].sections.append(TemplateSection(leaf))
        elif leaf.kind in ("endif", "endfor"):
            if not open_groups or leaf.kind != f"end{open_groups[-1].kind}":
                raise CannotTakeApart(f"a {leaf.kind} that ends nothing")
            open_groups.pop().tail = leaf
        else:
            place.append(leaf)
    if open_groups:
        raise CannotTakeApart(f"an {open_groups[-1].kind} without its end")
    for n, operand in enumerate(operand for leaf in walk(root) for operand in leaf.operands):
        operand.name = n
    return root


def walk(nodes: Sequence[Node]) -> Iterator[Leaf]:
    """Every leaf in order, heads and tails of groups too."""
    for node in nodes:
        if isinstance(node, Leaf):
            yield node
            continue
        for section in node.sections:
            yield section.head
            yield from walk(section.children)
        if node.tail is not None:
            yield node.tail


def _leaves(template: str) -> Iterator[Leaf]:
    position, before = 0, None
    while (found := OPENING.search(template, position)) is not None:
        start = found.start()
        braces = found.group()
        if braces == "{#":
            end = template.find("#}", start)
            stop = len(template) if end < 0 else end + 2
        else:
            stop = tag_end(template, start + 2, "%}" if braces == "{%" else "}}")
        tag = _tag(template[start:stop])
        if tag.kind == "raw":
            raise CannotTakeApart("a raw block")
        if start > position:
            yield _data(template[position:start], before, tag)
        tag.line = template.count("\n", 0, start) + 1
        yield tag
        position, before = stop, tag
    if position < len(template):
        rest = template[position:]
        yield _data(rest, before, None)


def _tag(source: str) -> Leaf:
    opening = source[:3] if source[2:3] in ("-", "+") else source[:2]
    closing = source[-3:] if source[-3:-2] in ("-", "+") and len(source) > 5 else source[-2:]
    body = source[len(opening) : len(source) - len(closing)].strip()
    if source.startswith("{#"):
        return Leaf("comment", source, [], opening, closing, body)
    if source.startswith("{%"):
        named = _KIND.match(source)
        if named and named.group(1) in ("generation", "endgeneration"):
            # A comment has the same white space around it.
            return _tag("{#" + source[2:-2] + "#}")
        return Leaf(named.group(1) if named else "", source, [], opening, closing, body)
    return Leaf("out", source, _operands(body), opening, closing, body)


def _data(source: str, before: Leaf | None, after: Leaf | None) -> Leaf:
    """Constant text, with what is left of it between these two tags."""
    text, starts_line = source, before is None
    if before is not None and before.closing.startswith("-"):
        text = text.lstrip()
    elif before is not None and before.kind != "out" and not before.closing.startswith("+"):
        starts_line = text.startswith("\n")
        text = text[starts_line:]
    if after is None:
        text = text.removesuffix("\n")
    elif after.opening.endswith("-"):
        text = text.rstrip()
    elif after.kind != "out" and not after.opening.endswith("+"):
        line = text.rfind("\n") + 1
        if (line or starts_line) and not text[line:].strip():
            text = text[:line]
    return Leaf("data", source, [Operand(text, text)] if text else [])


def _joined(leaves: list[Leaf]) -> list[Leaf]:
    """The same with macros and captured blocks as one opaque leaf each: what they write comes out elsewhere."""
    found: list[Leaf] = []
    depth, gathered = 0, ""
    for leaf in leaves:
        captures = leaf.kind in _CAPTURES or (leaf.kind == "set" and "=" not in leaf.body)
        depth += captures
        if depth:
            gathered += leaf.source
        else:
            found.append(leaf)
        if depth and leaf.kind.startswith("end") and leaf.kind[3:] in (*_CAPTURES, "set"):
            depth -= 1
            if not depth:
                found.append(Leaf("opaque", gathered))
                gathered = ""
    if depth:
        raise CannotTakeApart("a block without its end")
    return found


def _operands(body: str) -> list[Operand]:
    """The operands of a concatenation; the whole where it is none."""
    cuts: list[tuple[int, str]] = []
    depth, quote, plain = 0, "", []
    for position, char in enumerate(body):
        if quote:
            escaped = (len(body[:position]) - len(body[:position].rstrip("\\"))) % 2
            if char == quote and not escaped:
                quote = ""
            continue
        if char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0:
            plain.append(char)
            if char in "+~":
                cuts.append((position, char))
                plain.append(" ")
            continue
        if depth == 0:
            plain.append(" ")
    if not cuts or _LOOSE.search("".join(plain)):
        cuts = []
    bounds = [0, *(place + 1 for place, _ in cuts), len(body) + 1]
    found = []
    for n in range(len(bounds) - 1):
        source = body[bounds[n] : bounds[n + 1] - 1].strip()
        found.append(Operand(source, literal_text(source), cuts[n - 1][1] if n else ""))
    return found


def literal_text(source: str) -> str | None:
    """What a string literal means; None for any other expression."""
    if len(source) < 2 or source[0] not in "'\"" or source[-1] != source[0]:
        return None
    units = _UNIT.findall(source[1:-1])
    if source[0] in units:
        return None
    return "".join(_meaning(unit) for unit in units)


def _meaning(unit: str) -> str:
    return unit.encode("ascii", "backslashreplace").decode("unicode-escape") if unit.startswith("\\") else unit


def cut(operand: Operand, offset: int) -> tuple[Operand, Operand]:
    """A constant in two, after ``offset`` characters of what it writes."""
    assert operand.text is not None
    texts = operand.text[:offset], operand.text[offset:]
    sources = texts
    if operand.source != operand.text:
        quote, units = operand.source[0], _UNIT.findall(operand.source[1:-1])
        lengths = list(accumulate((len(_meaning(unit)) for unit in units), initial=0))
        place = lengths.index(offset)
        sources = quote + "".join(units[:place]) + quote, quote + "".join(units[place:]) + quote
    return Operand(sources[0], texts[0], operand.joiner), Operand(sources[1], texts[1], "+")


def explicit(nodes: Sequence[Node], mark: Callable[[Operand, Sequence[str]], str], loops: Sequence[str] = ()) -> str:
    """A template that renders the same with white space spelled out, and ``mark`` before what each operand writes.

    ``mark`` is given the operand and the heads of the loops around it, and gives template source.
    """
    written = []
    for node in nodes:
        if isinstance(node, BranchGroup):
            inner = [*loops, node.sections[0].head.body] if node.kind == "for" else loops
            for section in node.sections:
                written += [f"{{%- {section.head.body} -%}}", explicit(section.children, mark, inner)]
            written.append(f"{{%- {node.tail.body if node.tail else ''} -%}}")
        elif node.kind in ("out", "data"):
            for operand in node.operands:
                value = operand.source if operand.text is None else json.dumps(operand.text, ensure_ascii=False)
                written.append(f"{mark(operand, loops)}{{{{- {value} -}}}}")
        elif node.kind == "opaque":
            written.append(node.source)
        elif node.kind != "comment":
            written.append(f"{{%- {node.body} -%}}")
    return "".join(written)
