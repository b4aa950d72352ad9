"""Renders one chat template with one conversation: plainly, or with the template line of every character. The Jinja
environment is the one that ``transformers`` (5.19) builds for ``apply_chat_template``, except that the clock stands
still."""

import datetime
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import takewhile
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def _unguessable() -> str:
    """Digits, because they stay as they are when a template changes the case of a text."""
    return str(int.from_bytes(os.urandom(8), "little"))


NONCE = _unguessable()  # No template ever sees it.
_SEEN = _unguessable()  # Stands in marks that a template may see.
OPEN, CLOSE = f"\x00<{_SEEN}\x00", f"\x00>{_SEEN}\x00"
"""Marks around a generation block while provenance is recorded. They are removed before a text leaves this process."""
_MARK = re.compile(f"\x00(?:[<>]{_SEEN}|{_SEEN}[0-9]+|L([0-9]+);{NONCE})\x00")


def _line_mark(line: int) -> str:
    return f"\x00L{line};{NONCE}\x00"


class SandboxLimits:
    """What one render may use; set by the request."""

    output_chars = 4_000_000
    cpu_seconds = 2


class TooMuchOutput(Exception):
    """A render wrote more characters than it may."""


class GenerationTracker(jinja2.ext.Extension):
    """``{% generation %}``: remembers which characters lie inside, counted as ``transformers`` counts them."""

    tags = {"generation"}
    written = 0  # Characters that the template has yielded so far.
    spans: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if getattr(self.environment, "provenance", False):
            # The same scope as a call block, but written directly, so that each line inside keeps its number.
            marks = [nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (OPEN, CLOSE)]
            return nodes.Scope([marks[0], *body, marks[1]]).set_lineno(line)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        self.spans.append((self.written, self.written + len(text)))
        return text


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Clock:
    """The time that ``strftime_now`` tells: the variable of that name, an ISO date and time; else a fixed one."""

    FIXED = datetime.datetime(2026, 1, 1, 12, 0)
    now = FIXED

    @classmethod
    def strftime(cls, form: str) -> str:
        return cls.now.strftime(form)


def environment(provenance: bool) -> ImmutableSandboxedEnvironment:
    """The environment of ``apply_chat_template``."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTracker, jinja2.ext.loopcontrols],
        optimized=not provenance,  # to fold constants takes longer than the few renders with lines gain by it
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = Clock.strftime
    env.provenance = provenance  # type: ignore[attr-defined]
    return env


PLAIN = environment(provenance=False)
WRITTEN_THROUGH = environment(provenance=True)


@lru_cache(maxsize=64)
def compiled(text: str) -> jinja2.Template:
    template = PLAIN.from_string(text)
    template.globals = dict(template.globals)  # each render copies them, and a chain of maps is slow to copy
    return template


class NotedTexts:
    """Texts that this render wrote where the template may read them."""

    are_noted = True  # False = each text is written as it is, without a mark.
    by_mark: dict[str, tuple[int, str]] = {}  # Mark -> the line that wrote, and what it wrote, with the marks inside.


@jinja2.pass_context  # so that Jinja does not call it once for all, at the time of compiling
def _note(_: Any, value: Any, line: int) -> str:
    """The text of a value behind a new mark that stands for the line and for this very text."""
    text = str(value)
    if not NotedTexts.are_noted:
        return text
    mark = f"\x00{_SEEN}{_unguessable()}\x00"
    NotedTexts.by_mark[mark] = line, text
    return mark + text


_NOTE = f"note{NONCE}"
WRITTEN_THROUGH.filters[_NOTE] = _note


@lru_cache(maxsize=16)
def compiled_with_lines(text: str) -> tuple[jinja2.Template, bool, bool]:
    """The template writing a mark with its line before everything it writes. Whether its render without notes is the
    plain one: it has no generation tags. And whether it reads none of its output: then one render tells all.

    Jinja keeps no line for constant text: the generator's frame names the statement before it. The output of macros
    and blocks returns to the template as text, with its marks. Such a mark holds for the noted text only, so that no
    template can claim a line for a text which that line did not write.
    """
    tree = WRITTEN_THROUGH.parse(text)
    outputs = [*_outputs(tree)]
    has_tags = any(getattr(piece, "data", "") == OPEN for output, _ in outputs for piece in output.nodes)
    for output, may_return in outputs:
        marked: list[nodes.Expr] = []
        for piece in _pieces(output):
            if may_return and getattr(piece, "data", "") not in (OPEN, CLOSE):
                line = nodes.Const(piece.lineno)
                marked.append(nodes.Filter(piece, _NOTE, [line], [], None, None, lineno=piece.lineno))
            else:
                mark = nodes.TemplateData(_line_mark(piece.lineno), lineno=piece.lineno)
                marked += [piece] if may_return else [mark, piece]
        output.nodes = marked
    template = WRITTEN_THROUGH.from_string(tree)
    template.globals = dict(template.globals)
    return template, not has_tags, not (has_tags or any(may_return for _, may_return in outputs))


_RETURNING = nodes.Macro, nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock, nodes.Block


def _outputs(node: nodes.Node, may_return: bool = False) -> Iterator[tuple[nodes.Output, bool]]:
    """Every output below a node, and whether it may return to the template as text."""
    if isinstance(node, nodes.Output):
        yield node, may_return
    may_return = may_return or isinstance(node, _RETURNING) or (isinstance(node, nodes.For) and node.recursive)
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Stmt):
            yield from _outputs(child, may_return)


def _pieces(output: nodes.Output) -> Iterator[nodes.Expr]:
    """The expressions of an output, and its constant text line by line."""
    for child in output.nodes:
        if isinstance(child, nodes.TemplateData):
            for n, piece in enumerate(child.data.splitlines(keepends=True)):
                yield nodes.TemplateData(piece, lineno=child.lineno + n)
        else:
            yield child


def render_plain(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The rendered text and the generation spans as ``transformers`` counts them. Raises :class:`TooMuchOutput`."""
    template = compiled(text)
    GenerationTracker.spans, GenerationTracker.written = [], 0
    pieces = []
    for chunk in template.root_render_func(template.new_context(variables)):
        pieces.append(chunk)
        GenerationTracker.written += len(chunk)
        if GenerationTracker.written > SandboxLimits.output_chars:
            raise TooMuchOutput
    return {"text": "".join(pieces), "tracked_spans": GenerationTracker.spans}


def render_with_lines(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The plain render, the template line of each stretch, and where generation blocks really begin and end."""
    template = is_plain = is_exact = None
    with suppress(Exception):  # the plain render below says what is wrong, and where
        template, is_plain, is_exact = compiled_with_lines(text)
    if template is not None and is_plain:
        answer = {**_lines(template, variables, are_noted=False), "tracked_spans": []}
    else:
        answer = render_plain(text, variables)
    for are_noted in (True, False) if template is not None and not is_exact else ():
        with suppress(Exception):
            lines = _lines(template, variables, are_noted)
            # A template that measures or cuts the output of its macros meets the marks. Then the text differs here.
            if lines["text"] == answer["text"]:
                return {**answer, **lines}
    unknown = [[len(answer["text"]), 0]] if answer["text"] else []
    return {"lines": unknown, "spans": answer["tracked_spans"], **answer}


def _lines(template: Any, variables: dict[str, Any], are_noted: bool) -> dict[str, Any]:
    NotedTexts.are_noted, NotedTexts.by_mark = are_noted, {}
    pieces: list[str] = []
    lines: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    opened: list[int] = []
    position = 0

    def write(piece: str, line: int) -> None:
        nonlocal position
        if not piece:
            return
        pieces.append(piece)
        position += len(piece)
        if position > SandboxLimits.output_chars:
            raise TooMuchOutput
        if lines and lines[-1][1] == line:
            lines[-1][0] += len(piece)
        else:
            lines.append([len(piece), line])

    line = 0
    for chunk in template.root_render_func(template.new_context(variables)):
        if "\x00" not in chunk:
            write(chunk, line)
            continue
        start = 0
        noted: list[tuple[int, int]] = []  # (where a noted text ends, the line that wrote it), the innermost last
        for mark in [*_MARK.finditer(chunk), None]:
            stop = mark.start() if mark else len(chunk)
            while noted and noted[-1][0] <= stop:
                end, wrote = noted.pop()
                write(chunk[start:end], wrote)
                start = max(start, end)
            write(chunk[start:stop], noted[-1][1] if noted else line)
            if mark is None:
                break
            start = mark.end()
            if mark.group() == OPEN:
                opened.append(position)
            elif mark.group() == CLOSE:
                spans.append((opened.pop(), position))
            elif mark.group(1):
                line = int(mark.group(1))
            else:
                wrote, expected = NotedTexts.by_mark[mark.group()]
                noted.append((start + _same_characters(chunk, start, expected), wrote))
    return {"text": "".join(pieces), "lines": lines, "spans": spans}


def _same_characters(text: str, start: int, expected: str) -> int:
    """How many characters of ``text`` from ``start`` on are the expected ones."""
    if text.startswith(expected, start):
        return len(expected)
    pairs = zip(expected, text[start : start + len(expected)], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def line_of_error(error: BaseException) -> int | None:
    """The innermost template line of an exception's traceback."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        template = trace.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line


def failure(error: BaseException) -> dict[str, Any]:
    """An exception as a sentence, with its kind and the template line."""
    line = line_of_error(error)
    where = f" on line {line}" if line else ""
    message = str(error)[:500]
    if isinstance(error, MemoryError):
        return {"kind": "memory", "line": line, "error": "The template used more memory than a render may."}
    if isinstance(error, TooMuchOutput):
        sentence = f"The template wrote more than {SandboxLimits.output_chars:,} characters."
        return {"kind": "size", "line": line, "error": sentence}
    if isinstance(error, RecursionError):
        return {"kind": "depth", "line": line, "error": f"The template nests deeper than a render may{where}."}
    if isinstance(error, TemplateSyntaxError):
        return {"kind": "syntax", "line": line, "error": f"The template has a syntax error{where}: {message}"}
    if isinstance(error, SecurityError):
        return {"kind": "forbidden", "line": line, "error": f"The template does what is forbidden{where}: {message}"}
    if type(error) is TemplateError:
        return {"kind": "raises", "line": line, "error": f"The template raises{where}: {message}"}
    return {"kind": "raises", "line": line, "error": f"The template fails{where}: {type(error).__name__}: {message}"}
