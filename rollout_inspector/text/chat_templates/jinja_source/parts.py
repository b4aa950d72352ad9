"""A chat template taken apart: its outputs, operand by operand, inside the blocks that hold them. What a piece of
constant text renders as depends on the tags beside it (``-``, ``trim_blocks``, ``lstrip_blocks``), so each keeps both
its source and the text that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from rollout_inspector.text.chat_templates.jinja_source.tokens import Piece, pieces, top_level

_CAPTURES = {"macro", "call", "filter", "autoescape", "with", "block"}
_UNIT = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]+\}|[0-7]{1,3}|\n|.)|.", re.DOTALL)
"""One character of a string literal. Jinja's lexer reads the literal as one token, and a cut needs its characters."""
_LOOSE = frozenset(
    {"if", "else", "and", "or", "not", "in", "is", "==", "!=", "=", "<", "<=", ">", ">=", ","}
    | {"*", "**", "/", "//", "%", "-"}
)
"""Outside of brackets: an operator that binds looser than a concatenation, or may be arithmetic."""


class CannotTakeApart(Exception):
    """The template has a construct that this module does not follow; the message names it."""


@dataclass(eq=False)
class Operand:
    """A part of an output that is written at once: an expression, or constant text."""

    source: str  # Of an expression its text, quotes included; of constant text between two tags what it writes.
    text: str | None = None  # What a constant writes; None = an expression.
    joiner: str = ""  # ``+`` or ``~`` before it, in an output of several operands.
    name: int = -1


@dataclass(eq=False)
class Leaf:
    """A tag, a comment, an output or constant text."""

    kind: str  # As of a :class:`Piece`; ``opaque`` for a macro or a captured block as a whole.
    source: str
    operands: list[Operand] = field(default_factory=list)
    """Of ``output`` and ``data``; empty for constant text that writes nothing."""
    opening: str = ""
    closing: str = ""  # The braces of a tag, with their ``-`` or ``+``.
    body: str = ""  # What stands between them.
    line: int = 0  # 1-based; 0 = not known.
    is_cut: bool = False  # Its operands are no longer those of its source.


@dataclass(eq=False)
class BranchGroup:
    """A condition with its branches, or a loop."""

    kind: str
    sections: list[tuple[Leaf, list[Node]]]  # The tag that begins each branch, and what stands in the branch.
    tail: Leaf | None = None


Node = Leaf | BranchGroup


def take_apart(template: str) -> list[Node]:
    """The template as a tree; generation tags of its own become comments. Raises :class:`CannotTakeApart`."""
    root: list[Node] = []
    open_groups: list[BranchGroup] = []
    for leaf in _joined(map(_leaf, pieces(template))):
        place = open_groups[-1].sections[-1][1] if open_groups else root
        if leaf.kind in ("if", "for"):
            group = BranchGroup(leaf.kind, [(leaf, [])])
            place.append(group)
            open_groups.append(group)
        elif leaf.kind in ("elif", "else") and open_groups:
            open_groups[-1].sections.append((leaf, []))
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
        for head, children in node.sections:
            yield head
            yield from walk(children)
        if node.tail is not None:
            yield node.tail


def _leaf(piece: Piece) -> Leaf:
    """A piece of the source as a leaf; a generation tag becomes a comment, which strips the same white space."""
    if piece.kind in ("raw", "endraw"):
        raise CannotTakeApart("a raw block")
    if piece.kind == "unread":
        raise CannotTakeApart("text that Jinja cannot read")
    if piece.kind in ("generation", "endgeneration"):
        opening, closing = piece.opening.replace("%", "#"), piece.closing.replace("%", "#")
        return Leaf("comment", "{#" + piece.source[2:-2] + "#}", [], opening, closing, piece.body, piece.line)
    leaf = Leaf(piece.kind, piece.source, [], piece.opening, piece.closing, piece.body, piece.line)
    if piece.kind == "output":
        leaf.operands = _operands(piece)
    elif piece.written:
        leaf.operands = [Operand(piece.written, piece.written)]
    return leaf


def _joined(leaves: Iterable[Leaf]) -> list[Leaf]:
    """The leaves, with each macro and captured block as one opaque leaf: their output appears elsewhere."""
    joined: list[Leaf] = []
    depth, gathered = 0, ""
    for leaf in leaves:
        captures = leaf.kind in _CAPTURES or (leaf.kind == "set" and "=" not in leaf.body)
        depth += captures
        if depth:
            gathered += leaf.source
        else:
            joined.append(leaf)
        if depth and leaf.kind.startswith("end") and leaf.kind[3:] in (*_CAPTURES, "set"):
            depth -= 1
            if not depth:
                joined.append(Leaf("opaque", gathered))
                gathered = ""
    if depth:
        raise CannotTakeApart("a block without its end")
    return joined


def _operands(output: Piece) -> list[Operand]:
    """The operands of a concatenation; an output that is none is one operand."""
    tokens = output.tokens
    plain = top_level(tokens)
    joiners = [n for n in plain if tokens[n].text in ("+", "~")]
    if any(tokens[n].text in _LOOSE for n in plain):
        joiners = []
    operands_of = []
    for before, after in pairwise([-1, *joiners, len(tokens)]):
        part = tokens[before + 1 : after]
        is_literal = [token.kind for token in part] == ["string"]
        text = "".join(map(_meaning, _UNIT.findall(part[0].text[1:-1]))) if is_literal else None
        operands_of.append(Operand(output.text(part), text, tokens[before].text if before >= 0 else ""))
    return operands_of


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
    ``mark`` takes an operand and the heads of the loops around it, and returns template source."""
    written = []
    for node in nodes:
        if isinstance(node, BranchGroup):
            inner = [*loops, node.sections[0][0].body] if node.kind == "for" else loops
            for head, children in node.sections:
                written += [f"{{%- {head.body} -%}}", explicit(children, mark, inner)]
            written.append(f"{{%- {node.tail.body if node.tail else ''} -%}}")
        elif node.kind in ("output", "data"):
            for operand in node.operands:
                value = operand.source if operand.text is None else json.dumps(operand.text, ensure_ascii=False)
                written.append(f"{mark(operand, loops)}{{{{- {value} -}}}}")
        elif node.kind == "opaque":
            written.append(node.source)
        elif node.kind != "comment":
            written.append(f"{{%- {node.body} -%}}")
    return "".join(written)
