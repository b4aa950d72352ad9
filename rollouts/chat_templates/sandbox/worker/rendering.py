"""Renders one chat template with one conversation: plainly, or with the template line of every character.

The Jinja environment is the one that ``transformers`` (5.19) builds for ``apply_chat_template``, except that the clock
stands still.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Iterator
from functools import lru_cache
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

NONCE = secrets.token_hex(8)
OPEN, CLOSE = f"\x00<{NONCE}\x00", f"\x00>{NONCE}\x00"
"""Marks around a generation block while provenance is recorded. They are removed before a text leaves this process."""
_LINE_MARK = re.compile(f"\x00(?:<|>|L[0-9]+;){NONCE}\x00")


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
    written = 0
    """Characters that the template has yielded so far."""
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
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTracker, jinja2.ext.loopcontrols]
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


@lru_cache(maxsize=16)
def compiled_with_lines(text: str, inside_macros: bool) -> jinja2.Template:
    """The template writing a mark with its line before everything it writes.

    Jinja keeps no line for constant text: the generator's frame names the statement before it. The output of macros and
    blocks returns to the template as text. So the template may see the marks in it.
    """
    tree = WRITTEN_THROUGH.parse(text)
    captured: set[int] = set()
    if not inside_macros:
        for block in tree.find_all((nodes.Macro, nodes.AssignBlock, nodes.CallBlock, nodes.FilterBlock)):
            captured.update(id(output) for output in block.find_all(nodes.Output))
    for output in tree.find_all(nodes.Output):
        if id(output) in captured:
            continue
        marked: list[nodes.Expr] = []
        for child in output.nodes:
            if isinstance(child, nodes.TemplateData):
                for n, piece in enumerate(child.data.splitlines(keepends=True)):
                    marked.append(nodes.TemplateData(_line_mark(child.lineno + n) + piece, lineno=child.lineno))
            else:
                marked += [nodes.TemplateData(_line_mark(child.lineno), lineno=child.lineno), child]
        output.nodes = marked
    code = WRITTEN_THROUGH.compile(tree)
    return WRITTEN_THROUGH.template_class.from_code(
        WRITTEN_THROUGH, code, WRITTEN_THROUGH.make_globals(None), lambda: True
    )


def chunks(template: jinja2.Template, variables: dict[str, Any]) -> Iterator[str]:
    """What the template yields. Raises :class:`TooMuchOutput`."""
    written = 0
    for chunk in template.root_render_func(template.new_context(variables)):
        written += len(chunk)
        if written > SandboxLimits.output_chars:
            raise TooMuchOutput
        yield chunk


def render_plain(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The rendered text and the generation spans as ``transformers`` counts them."""
    template = compiled(text)
    GenerationTracker.spans, GenerationTracker.written = [], 0
    pieces = []
    for chunk in chunks(template, variables):
        pieces.append(chunk)
        GenerationTracker.written += len(chunk)
    return {"text": "".join(pieces), "tracked_spans": GenerationTracker.spans}


def render_with_lines(text: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The plain render, the template line of each stretch, and where generation blocks really begin and end."""
    answer = render_plain(text, variables)
    for inside_macros in (True, False):
        try:
            found = _lines(text, variables, inside_macros)
        except Exception:
            continue
        # A template that reads the output of its macros may see the marks. Then the text differs here.
        if found["text"] == answer["text"]:
            return {**answer, **found}
    return {**answer, "lines": [[len(answer["text"]), 0]] if answer["text"] else [], "spans": answer["tracked_spans"]}


def _lines(text: str, variables: dict[str, Any], inside_macros: bool) -> dict[str, Any]:
    template = compiled_with_lines(text, inside_macros)
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
        if lines and lines[-1][1] == line:
            lines[-1][0] += len(piece)
        else:
            lines.append([len(piece), line])

    line = 0
    for chunk in chunks(template, variables):
        if "\x00" not in chunk:
            write(chunk, line)
            continue
        start = 0
        for mark in _LINE_MARK.finditer(chunk):
            write(chunk[start : mark.start()], line)
            start = mark.end()
            if mark.group() == OPEN:
                opened.append(position)
            elif mark.group() == CLOSE:
                spans.append((opened.pop(), position))
            else:
                line = int(mark.group()[2:].split(";")[0])
        write(chunk[start:], line)
    return {"text": "".join(pieces), "lines": lines, "spans": spans}


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
    said = _LINE_MARK.sub("", str(error))[:500]
    if isinstance(error, MemoryError):
        return {"kind": "memory", "line": line, "error": "The template used more memory than a render may."}
    if isinstance(error, TooMuchOutput):
        sentence = f"The template wrote more than {SandboxLimits.output_chars:,} characters."
        return {"kind": "size", "line": line, "error": sentence}
    if isinstance(error, RecursionError):
        return {"kind": "depth", "line": line, "error": f"The template nests deeper than a render may{where}."}
    if isinstance(error, TemplateSyntaxError):
        return {"kind": "syntax", "line": line, "error": f"The template has a syntax error{where}: {said}"}
    if isinstance(error, SecurityError):
        return {"kind": "forbidden", "line": line, "error": f"The template does what is forbidden{where}: {said}"}
    if type(error) is TemplateError:
        return {"kind": "raises", "line": line, "error": f"The template raises{where}: {said}"}
    return {"kind": "raises", "line": line, "error": f"The template fails{where}: {type(error).__name__}: {said}"}
