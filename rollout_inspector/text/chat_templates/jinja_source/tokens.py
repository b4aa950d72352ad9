"""The one reader of Jinja source: a chat template as pieces and tokens, each with its offsets in the template's text.

The tokens are those of Jinja's own lexer, set as ``apply_chat_template`` sets it. The lexer drops white space that a
tag strips and the last line break, and it turns every line break into ``\\n``. So the offsets are counted here.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, TemplateSyntaxError
from jinja2.lexer import newline_re

LEXER = Environment(trim_blocks=True, lstrip_blocks=True).lexer
_TAG_KINDS = {"variable_begin": "output", "comment_begin": "comment", "raw_begin": "raw", "raw_end": "endraw"}
"""Token that opens a tag -> kind of the piece; a ``block_begin`` opens a statement, whose kind is its first word."""
_TAG_ENDS = ("block_end", "variable_end", "comment_end")


@dataclass(frozen=True)
class Token:
    """One token inside a tag; white space is no token."""

    kind: str  # As Jinja's lexer names it: ``name``, ``operator``, ``string``, ``integer``, ``float``, ``comment``.
    text: str  # As it is written in the template, quotes included.
    start: int  # Offset of its first character in the template.

    @property
    def stop(self) -> int:
        """Offset after its last character."""
        return self.start + len(self.text)


@dataclass(frozen=True, eq=False)
class Piece:
    """A statement, an output, a comment, or the constant text between two of them."""

    kind: str  # The first word of a statement; else ``output``, ``comment``, ``data`` (constant text), or ``unread``.
    source: str
    start: int  # Offset in the template.
    line: int = 0  # 1-based, of a tag; 0 = not known.
    opening: str = ""
    closing: str = ""  # The braces of a tag, with their ``-`` or ``+``.
    tokens: tuple[Token, ...] = ()  # What stands between the braces, the first word of a statement included.
    written: str = ""
    """Of constant text: what is left of it in a render, once the tags beside it have stripped white space."""

    @property
    def body(self) -> str:
        """What stands between the braces, without the white space around it."""
        return self.source[len(self.opening) : len(self.source) - len(self.closing)].strip()

    @property
    def expression(self) -> tuple[Token, ...]:
        """The tokens of an output, or those after the first word of a statement."""
        return self.tokens if self.kind == "output" else self.tokens[1:]

    def text(self, tokens: Sequence[Token]) -> str:
        """The source from the first to the last of some tokens of this piece; empty for none."""
        return self.source[tokens[0].start - self.start : tokens[-1].stop - self.start] if tokens else ""


@lru_cache(maxsize=8)
def pieces(template: str) -> tuple[Piece, ...]:
    """All pieces in order; their sources, joined, are the template. Never raises: from the place on where Jinja's lexer
    stops at an error, the rest is one piece of kind ``unread``."""
    return tuple(_pieces(template))


def _pieces(template: str) -> Iterator[Piece]:
    source = newline_re.sub("\n", template)
    raw: Sequence[int] = range(len(template) + 1)
    if source != template:
        raw = [*(match.start() for match in re.finditer("\r\n|.", template, re.DOTALL)), len(template)]
    at = done = 0  # Offsets in ``source``: of the next token, and after the last piece.
    line, opening, written = 0, "", ""
    kind, tokens = "", list[Token]()
    try:
        for token_line, token, value in LEXER.tokeniter(source, None):
            if token == "data":
                written = value
            elif token == "block_begin" or token in _TAG_KINDS:
                at = source.index("{", at)  # behind the white space that this tag strips
                if at > done:
                    yield Piece("data", template[raw[done] : raw[at]], raw[done], written=written)
                done, written = at, ""
                line, opening, kind, tokens = token_line, value.rstrip(), _TAG_KINDS.get(token, ""), []
            elif token not in (*_TAG_ENDS, "whitespace"):
                tokens.append(Token(token, template[raw[at] : raw[at + len(value)]], raw[at]))
                kind = kind or value
            if token in _TAG_ENDS or token in ("raw_begin", "raw_end"):
                stop = at + len(value.rstrip())  # the token holds the white space that the tag strips behind it
                closing = value.rstrip() if token in _TAG_ENDS else ""
                yield Piece(kind, template[raw[done] : raw[stop]], raw[done], line, opening, closing, tuple(tokens))
                done, opening = stop, ""
            at += len(value)
    except TemplateSyntaxError:
        opening = opening or "{"
    if done < len(source):
        tail = template[raw[done] :]
        yield Piece("unread", tail, raw[done]) if opening else Piece("data", tail, raw[done], written=written)


def top_level(tokens: Sequence[Token]) -> list[int]:
    """The indices of the tokens that stand outside of all brackets, the brackets left out."""
    depth, parts = 0, []
    for n, token in enumerate(tokens):
        if token.text in ("(", "[", "{"):
            depth += 1
        elif token.text in (")", "]", "}"):
            depth -= 1
        elif depth == 0:
            parts.append(n)
    return parts
