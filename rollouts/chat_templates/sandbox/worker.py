"""The program that renders chat templates inside the sandbox: a subprocess with hard limits that trusts no template.

Started as a file (``python -I worker.py``); it knows the standard library and Jinja alone, holds no secret and
answers requests on its standard streams: four bytes of length, then JSON. The Jinja environment is the one that
``transformers`` (5.19) builds for ``apply_chat_template``, except that the clock stands still.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NONCE = secrets.token_hex(8)
OPEN, CLOSE = f"\x00<{_NONCE}\x00", f"\x00>{_NONCE}\x00"
"""Written around a generation block while provenance is recorded; taken out before anything leaves this process."""
_LINE_MARK = re.compile(f"\x00(?:<|>|L[0-9]+;){_NONCE}\x00")


def _line_mark(line: int) -> str:
    return f"\x00L{line};{_NONCE}\x00"


class SandboxLimits:
    """What one render may use; set by the request."""

    output_chars = 4_000_000
    cpu_seconds = 2


class TooMuchOutput(Exception):
    pass


class GenerationTracker(jinja2.ext.Extension):
    """``{% generation %}``: remembers which characters lie inside, by the arithmetic that ``transformers`` uses."""

    tags = {"generation"}
    written = 0
    """Characters that the template has yielded so far."""
    spans: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if getattr(self.environment, "provenance", False):
            # The same scope as a call block has, but written through, so that each line inside keeps its name.
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
    """The time that ``strftime_now`` tells: the same for all renders of a request."""

    now = datetime.datetime(2026, 1, 1, 12, 0)

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

    Jinja keeps no line for constant text, so the generator's frame alone would name the statement before it. What is
    written inside macros and blocks comes back to the template as text, which may then notice the marks.
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
        # A template that looks at what its macros wrote can notice the marks; then it is told apart here.
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


Render = Callable[[str, dict[str, Any]], dict[str, Any]]


def answer(text: str, job: dict[str, Any], limit: bool = True, render: Render = render_plain) -> dict[str, Any]:
    """One render; without ``limit`` it goes on using the computing time that an earlier one was allowed."""
    if limit:
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SandboxLimits.cpu_seconds + 1, resource.RLIM_INFINITY))
    now = job.get("now")
    Clock.now = datetime.datetime.fromisoformat(now) if now else datetime.datetime(2026, 1, 1, 12, 0)
    try:
        return (render_with_lines if job.get("lines") else render)(text, job["variables"])
    except Exception as error:
        return failure(error)


# -- conversations that grow
#
# Most templates write message by message, in one loop at the top. Where a conversation begins like the one before it,
# the bodies of the messages that both have are not run again: their text is taken over. This is right as long as a body
# follows from nothing but its message, those before it, the one behind it and what does not change: so a template that
# carries values from body to body is never resumed (`_walks`), and whatever tells how many messages there are is noted
# while it renders (`Seen`), so that nothing is taken over from there on.


class Beginning:
    """What a render can be resumed from, and how far it has come."""

    def __init__(self, messages: list[int], fixed: tuple[Any, ...]) -> None:
        self.messages, self.fixed = messages, fixed
        """Indices of its messages; tools and kwargs."""
        self.text = ""
        self.pieces: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.marks: list[tuple[int, int]] = []
        """At the start of each body: characters written, spans noted."""
        self.ends: list[tuple[int, int] | None] = []
        """The same at the end of each body; None where the body may have looked at the message behind its own."""
        self.begun = self.pulled = 0
        """Bodies, and messages that the loop has asked for: more by one where a body looked at the next."""
        self.saw_next = False
        self.alike: int | None = None
        """Bodies before the first that could see how many messages there are; None = no body could."""
        self.skipped = 0
        self.earlier: Beginning | None = None

    def sees_the_end(self) -> None:
        if self.alike is None:
            self.alike = self.begun - 1

    def go_on_from(self, earlier: Beginning | None) -> None:
        """Skip what both have; the last message that both have only if its body did not look at what comes behind."""
        if earlier is None or earlier.fixed != self.fixed:
            return
        both = 0
        for ours, theirs in zip(self.messages, earlier.messages, strict=False):
            if ours != theirs:
                break
            both += 1
        alike = both if earlier.alike is None else earlier.alike
        n = max(0, min(both, alike, len(earlier.marks), len(self.messages) - 1))
        if n and n in (both, len(earlier.marks)) and earlier.ends[n - 1] is None:
            n -= 1
        self.skipped, self.earlier = n, earlier

    def walk(self, messages: Any) -> Any:
        """What the loop walks over."""
        if isinstance(messages, Seen):
            return Walked(list.copy(messages), self)
        self.sees_the_end()  # the template made another list of them
        return messages

    def begins_body(self, message: Any) -> bool:
        """Whether the next body is to be run."""
        n = self.begun
        self.begun += 1
        self.saw_next = False
        if n < self.skipped:
            return False
        if n == self.skipped and n and self.earlier is not None:
            before = self.earlier
            written, n_spans = before.marks[n] if n < len(before.marks) else before.ends[n - 1] or (0, 0)
            if "".join(self.pieces) != before.text[: before.marks[0][0]]:
                raise ValueError("what stands before the first message is not the same")
            self.marks, self.ends = before.marks[:n], before.ends[:n]
            self.pieces[:] = [before.text[:written]]
            GenerationTracker.spans[:] = before.spans[:n_spans]
            GenerationTracker.written = written
        self.marks.append((GenerationTracker.written, len(GenerationTracker.spans)))
        self.ends.append(None)
        return True

    def ends_body(self, message: Any) -> None:
        if self.pulled == self.begun and not self.saw_next:
            self.ends[-1] = GenerationTracker.written, len(GenerationTracker.spans)


class Seen(list[Any]):
    """The messages as a template sees them; a look that tells how many there are is noted."""

    def __init__(self, values: list[Any], render: Beginning) -> None:
        super().__init__(values)
        self._render = render  # a name that no template can reach

    def __bool__(self) -> bool:
        return list.__len__(self) > 0  # no render that is resumed has none

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index <= self._render.begun:
            self._render.sees_the_end()
        elif index == self._render.begun:
            self._render.saw_next = True
        return list.__getitem__(self, index)

    def __radd__(self, other: Any) -> Any:
        self._render.sees_the_end()
        return other + list(self)


class Walked(list[Any]):
    """The messages as the loop walks over them."""

    def __init__(self, values: list[Any], render: Beginning) -> None:
        super().__init__(values)
        self._render = render  # a name that no template can reach

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self._render.pulled += 1
            yield value
        self._render.pulled += 1


def _noted(name: str) -> Any:
    real = getattr(list, name)

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._render.sees_the_end()
        return real(self, *args, **kwargs)

    return look


for _name in ("__len__", "__iter__", "__reversed__", "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
              "__ge__", "__add__", "__mul__", "__rmul__", "__repr__", "index", "count", "copy"):  # fmt: skip
    setattr(Seen, _name, _noted(_name))
Walked.__len__ = _noted("__len__")  # type: ignore[method-assign]

_WALK, _BEGINS, _ENDS = f"walk{_NONCE}", f"begins{_NONCE}", f"ends{_NONCE}"
RESUMABLE = environment(provenance=False)


def _tell(render: Beginning) -> None:
    """Templates tell this render of their loop; they look up whom to tell when they begin, and when compiled."""
    RESUMABLE.filters[_WALK] = render.walk
    RESUMABLE.tests[_BEGINS], RESUMABLE.tests[_ENDS] = render.begins_body, render.ends_body


_tell(Beginning([], ()))
_CARRIES = frozenset({"namespace", "cycler", "joiner", "lipsum", "caller"})
_ODD_FILTERS = frozenset({"random", "pprint", "attr"})
_LAZY = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "reverse", "items", "unique"}
)
"""Filters that give what can be read once."""


def _walks(tree: nodes.Template) -> nodes.For | None:
    """The loop over the messages, when each run of its body follows from the messages and from nothing else."""
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, "messages")]
    if len(loops) != 1 or not isinstance(loops[0].target, nodes.Name):
        return None
    loop, place = loops[0], tree.body.index(loops[0])
    before, upto = nodes.Template(tree.body[:place]), nodes.Template(tree.body[: place + 1])
    is_odd = (
        bool(loop.test or loop.else_ or loop.recursive)
        or any(node.name in _CARRIES for node in tree.find_all(nodes.Name))
        or any(node.name in _ODD_FILTERS for node in tree.find_all(nodes.Filter))
        or any(node.attr == "changed" for node in tree.find_all(nodes.Getattr))
        or any(node.value == "changed" for node in tree.find_all(nodes.Const))
        or any(True for _ in tree.find_all((nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)))
        or any(_is_name(node, "add_generation_prompt") for node in upto.find_all(nodes.Name))
        or any(node.name in _LAZY for kept in before.find_all(nodes.Assign) for node in kept.find_all(nodes.Filter))
    )
    return None if is_odd else loop


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


@lru_cache(maxsize=16)
def resumable(text: str) -> jinja2.Template | None:
    """The template with its loop over the messages telling where each body begins and ends; None where it cannot be
    resumed."""
    tree = RESUMABLE.parse(text)
    loop = _walks(tree)
    if loop is None:
        return None
    assert isinstance(loop.target, nodes.Name)
    message = nodes.Name(loop.target.name, "load")
    begins, ends = (nodes.Test(message, name, [], [], None, None) for name in (_BEGINS, _ENDS))
    loop.iter = nodes.Filter(loop.iter, _WALK, [], [], None, None)
    end = nodes.ExprStmt(ends)
    loop.body = [nodes.If(begins, [*loop.body, end], [], [])]
    for node in (message, begins, ends, end, loop.iter, loop.body[0]):
        node.set_lineno(loop.lineno).set_environment(RESUMABLE)
    code = RESUMABLE.compile(tree)
    return RESUMABLE.template_class.from_code(RESUMABLE, code, dict(RESUMABLE.globals), lambda: True)


TRIES = 8
"""Resumed renders of a template that are made from the start as well, to compare."""
_tried: dict[str, int] = {}
"""Template -> how many were the same; -1 = one was not."""


def render_growing(text: str, variables: dict[str, Any], here: Beginning, earlier: Beginning | None) -> dict[str, Any]:
    """:func:`render_plain`, going on from an earlier render where that is the same."""
    answered = None
    try:
        template = resumable(text) if here.messages and _tried.get(text, 0) >= 0 else None
        if template is not None:
            answered = _resumed(template, variables, here, earlier)
    except Exception:  # the plain render says what is wrong, and where
        here.marks = []
    if answered is None:
        return render_plain(text, variables)
    if here.skipped and _tried.get(text, 0) < TRIES:
        plain = render_plain(text, variables)
        _tried[text] = _tried.get(text, 0) + 1 if plain == answered else -1
        return plain
    return answered


def _resumed(
    template: jinja2.Template, variables: dict[str, Any], here: Beginning, earlier: Beginning | None
) -> dict[str, Any]:
    _tell(here)
    here.go_on_from(earlier)
    GenerationTracker.spans, GenerationTracker.written = here.spans, 0
    seen = {**variables, "messages": Seen(variables["messages"], here)}
    for chunk in template.root_render_func(template.new_context(seen)):
        here.pieces.append(chunk)
        GenerationTracker.written += len(chunk)
        if GenerationTracker.written > SandboxLimits.output_chars:
            raise TooMuchOutput
    here.text = "".join(here.pieces)
    here.pieces, here.earlier = [], None
    return {"text": here.text, "tracked_spans": here.spans}


def answer_series(text: str, job: dict[str, Any]) -> dict[str, Any]:
    """Many renders that share messages, as one job with one allowance of computing time.

    Each outcome is a failure, or ``[characters kept from the text before it, the rest, tracked spans kept from those
    before them, the ends of the rest]``.
    """
    base, messages, tools = job["variables"], job["messages"], job["tools"]
    outcomes: list[Any] = []
    before = ""
    spans_before: list[tuple[int, int]] = []
    earlier: Beginning | None = None
    for n, (indices, tools_index, kwargs, generation) in enumerate(job["series"]):
        variables = {
            **base, **job["kwargs"][kwargs], "messages": [messages[index] for index in indices],
            "tools": None if tools_index is None else tools[tools_index], "add_generation_prompt": generation,
        }  # fmt: skip
        here = Beginning(indices, (tools_index, kwargs))
        render = partial(render_growing, here=here, earlier=earlier)
        rendered = answer(text, {"variables": variables, "now": job.get("now")}, limit=n == 0, render=render)
        earlier = here
        if rendered.get("kind") == "memory":
            return rendered
        if "error" in rendered:
            outcomes.append(rendered)
            continue
        now, spans = rendered["text"], rendered["tracked_spans"]
        kept = len(before) if now.startswith(before) else 0
        n_kept = len(spans_before) if spans[: len(spans_before)] == spans_before else 0
        outcomes.append([kept, now[kept:], n_kept, [end for span in spans[n_kept:] for end in span]])
        before, spans_before = now, spans
    return {"series": outcomes}


def read_exactly(stream: BinaryIO, n: int) -> bytes:
    data = stream.read(n)
    if len(data) != n:
        raise EOFError
    return data


def write_message(stream: BinaryIO, value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    (n,) = struct.unpack("<I", read_exactly(stream, 4))
    return json.loads(read_exactly(stream, n).decode("utf-8", "surrogatepass"))


def _end_with_parent() -> None:
    """A worker whose parent was killed must not stay: nobody reads its pipe."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    memory = int(sys.argv[1])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _end_with_parent()
    with open("/proc/self/statm", "rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory, mapped + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    write_message(answers, {"ready": True})
    while True:
        try:
            request = read_message(requests)
        except EOFError:
            return
        SandboxLimits.output_chars = request["output_chars"]
        SandboxLimits.cpu_seconds = request["cpu_seconds"]
        for job in request["jobs"]:
            answers_to = answer_series if "series" in job else answer
            answered = answers_to(request["template"], job)
            try:
                write_message(answers, answered)
            except MemoryError:
                write_message(answers, failure(MemoryError()))
                return
            if answered.get("kind") == "memory":
                # What is left of a heap that ran full is not trusted with the next template.
                return


if __name__ == "__main__":
    main()
