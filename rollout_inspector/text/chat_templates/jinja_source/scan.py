"""Where the tags of a chat template stand: which condition guards a line, and what the template reads."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from rollout_inspector.text.chat_templates.jinja_source.tokens import Piece, Token, pieces

_COMMON = frozenset(
    {"and", "or", "not", "is", "in", "if", "else", "true", "false", "none", "defined", "loop", "string"}
)
_READS_ID = re.compile(r"\b(?:tool_call_)?id\b")
_GIVEN = _COMMON | {
    "messages", "tools", "documents", "add_generation_prompt", "strftime_now", "date_string", "True", "False", "None",
}
"""Names that every template has, or whose values are found elsewhere."""
_COMPARES = ("==", "!=", "is")
FAR = 9  # The distance of a line that has no visible connection with a difference.


def scan(template: str) -> list[Piece]:
    """All statements and outputs of a template, in order."""
    return [piece for piece in pieces(template) if piece.tokens and piece.kind != "comment"]


def branches(template: str) -> Iterator[tuple[Piece, Piece, range]]:
    """All branches of all conditions: the tag that begins the branch, the ``if`` that it belongs to, and its lines. The
    lines are 1-based, from that of the first tag to that of the tag that ends the branch."""
    stack: list[tuple[Piece, Piece]] = []
    for tag in scan(template):
        if tag.kind in ("if", "for"):
            stack.append((tag, tag))
        elif tag.kind in ("elif", "else") and stack:
            opened_by, condition = stack.pop()
            yield condition, opened_by, range(condition.line, tag.line + 1)
            stack.append((opened_by, tag))
        elif tag.kind in ("endif", "endfor") and stack:
            opened_by, condition = stack.pop()
            if opened_by.kind == "if":
                yield condition, opened_by, range(condition.line, tag.line + 1)


def deciding_condition(template: str, one: int | None, other: int | None) -> Piece | None:
    """The innermost condition that guards one of two lines and not the other: the likeliest cause of a difference.
    ``one`` and ``other``: 1-based lines of the template, None = not known. Returns None where there is none."""
    if one is None or other is None or one == other:
        return None
    for line, against in ((one, other), (other, one)):
        guarding = [branch for branch in branches(template) if line in branch[2] and against not in branch[2]]
        if guarding:
            condition, opened_by, _ = min(guarding, key=lambda branch: len(branch[2]))
            return opened_by if condition.kind == "else" else condition
    return None


def suspects(template: str, pairs: Iterable[tuple[int | None, int | None]]) -> dict[int, int]:
    """Lines that can have caused differences between what two lines wrote: 1-based line -> distance from the cause.
    Distance 0: the two lines, and each condition that guards one of them and not the other. Distance 1: the lines that
    set a name that these conditions read, and what guards these lines. Distance 2 and more: the same from there on."""
    tags, all_branches = scan(template), list(branches(template))
    chains: dict[Piece, set[int]] = {}
    for condition, opened_by, _ in all_branches:
        chains.setdefault(opened_by, set()).add(condition.line)
    scores: dict[int, int] = {}
    near: set[int] = set()
    for branch_line, other in pairs:
        for line, against in ((branch_line, other), (other, branch_line)):
            if line is None:
                continue
            near.add(line)
            for _, opened_by, lines in all_branches:
                if line in lines and against not in lines:
                    near |= chains[opened_by]
    for distance in range(4):
        for line in near:
            scores.setdefault(line, distance)
        names = {
            name
            for tag in tags
            if tag.line in near and tag.kind in ("if", "elif", "set", "output", "for")
            for name in _names(tag.expression)
        }
        sets = [tag for tag in tags if tag.kind == "set" and next(_names(tag.expression), "") in names]
        near = {tag.line for tag in sets}
        for tag in sets:
            for _, opened_by, lines in all_branches:
                if tag.line in lines:
                    near |= chains[opened_by]
        near -= scores.keys()
    return scores


def _names(tokens: Sequence[Token]) -> Iterator[str]:
    """The names that an expression reads, each with its first attribute: ``ns.x``."""
    for n, token in enumerate(tokens):
        if token.kind == "name" and token.text not in _COMMON and tokens[max(n - 1, 0)].text != ".":
            has_attribute = [after.text for after in tokens[n + 1 : n + 2]] == ["."]
            yield "".join(part.text for part in tokens[n : n + 3]) if has_attribute else token.text


def switches(template: str) -> dict[str, tuple[object, ...]]:
    """The names that a template takes from its caller, in order, with values that it tells apart. Of a name that it
    loops over these are lists. A name without values is tested alone, or written."""
    values: dict[str, list[object]] = {}
    elements: dict[str, list[object]] = {}
    own_names, loops = set(_GIVEN), dict[str, str]()
    for tag in scan(template):
        tokens = tag.expression
        words = [token.text for token in tokens]
        binder = {"set": "=", "for": "in", "macro": ")", "call": ")"}.get(tag.kind, "")
        stop = words.index(binder) if binder in words else 0
        bound = {token.text for token in tokens[:stop] if token.kind == "name"}
        own_names |= bound if tag.kind != "set" else set()
        padded = ["", "", *words, "", ""]
        for n, name in enumerate(words[stop:], stop):
            prior, following = padded[n : n + 2], padded[n + 3 : n + 5]
            if tokens[n].kind != "name" or prior[1] in (".", "|") or prior == ["is", "not"]:
                continue
            if prior[1] == "is" or following[0] in ("(", "=") or name.endswith("_token"):
                continue
            if name in values or name not in own_names:
                literals = values.setdefault(name, [])
                if tag.kind == "for" and n == stop + 1:
                    loops[words[0]] = name
                literals += _literals(following[1] if following[0] in _COMPARES else "")
                literals += _literals(prior[0] if prior[1] == "==" else "")
                elements.setdefault(name, []).extend(_literals(prior[0] if prior[1] == "in" else ""))
            elif name in loops:
                elements[loops[name]] += _literals(following[1] if following[0] in _COMPARES else "")
        own_names |= bound
    for name, parts in elements.items():
        distinct = list(dict.fromkeys(parts))
        values[name] += [[part] for part in distinct] + [distinct] * (len(distinct) > 1)
    return {name: tuple({repr(value): value for value in literals}.values()) for name, literals in values.items()}


def _literals(word: str) -> Iterator[object]:
    with suppress(ValueError, SyntaxError):
        yield ast.literal_eval({"true": "True", "false": "False"}.get(word, word))


def wants_call_ids(template: str) -> bool:
    """Whether a chat template reads the ids of calls, so that a call without one may be refused."""
    return any(_READS_ID.search(piece.source) for piece in pieces(template) if piece.kind != "comment")


def line_text(template: str, line: int | None) -> str:
    """A line of the template, 1-based, without white space around it; empty when there is none."""
    lines = template.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""
