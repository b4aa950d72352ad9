"""Answers requests on the standard streams: four bytes of length, then JSON. Sets the limit of time of each render."""

import datetime
import importlib
import json
import resource
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from .expressions import search
from .rendering import Clock, SandboxLimits, failure, render_plain, render_with_lines
from .resuming import ResumableRender, render_growing

Render = Callable[[str, dict[str, Any]], dict[str, Any]]
_LOADED_LATE = ("encodings.unicode_escape", "html", "jinja2.constants", "jinja2.debug", "pprint", "unicodedata")
"""Modules that Python and Jinja load in the middle of a render. No file can be opened then."""


def limit_seconds(seconds: int) -> None:
    """Let this process compute so many seconds more; then the kernel ends it."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, resource.RLIM_INFINITY))


def answer(text: str, job: dict[str, Any], limit: bool = True, render: Render = render_plain) -> dict[str, Any]:
    """The outcome of one render as JSON. Without ``limit`` it shares the computing time of an earlier render."""
    if limit:
        limit_seconds(SandboxLimits.cpu_seconds)
    variables = dict(job["variables"])
    try:
        now = variables.pop("strftime_now", None)
        Clock.now = datetime.datetime.fromisoformat(now) if now else Clock.FIXED
        return (render_with_lines if job.get("lines") else render)(text, variables)
    except Exception as error:
        return failure(error)


def answer_series(text: str, job: dict[str, Any]) -> dict[str, Any]:
    """Many renders that share messages, as one job with one allowance of computing time. Each outcome is a failure, or
    ``[characters kept from the text before it, the rest, tracked spans kept from those before them, the ends of the
    rest]``."""
    base, messages, tools = job["variables"], job["messages"], job["tools"]
    outcomes: list[Any] = []
    before = ""
    spans_before: list[tuple[int, int]] = []
    earlier: ResumableRender | None = None
    for n, (indices, tools_index, kwargs, generation) in enumerate(job["renders"]):
        variables = {
            **base, **job["kwargs"][kwargs], "messages": [messages[index] for index in indices],
            "tools": None if tools_index is None else tools[tools_index], "add_generation_prompt": generation,
        }
        here = ResumableRender(indices, (tools_index, kwargs))
        render = partial(render_growing, here=here, earlier=earlier)
        rendered = answer(text, {"variables": variables}, limit=n == 0, render=render)
        earlier = here
        if rendered.get("kind") == "memory":
            return rendered
        if "error" in rendered:
            outcomes.append(rendered)
            continue
        now, spans = rendered["text"], rendered["tracked_spans"]
        n_shared = len(before) if now.startswith(before) else 0
        n_kept = len(spans_before) if spans[: len(spans_before)] == spans_before else 0
        outcomes.append([n_shared, now[n_shared:], n_kept, [end for span in spans[n_kept:] for end in span]])
        before, spans_before = now, spans
    return {"series": outcomes}


def read_exactly(stream: BinaryIO, n: int) -> bytes:
    """``n`` bytes. Raises ``EOFError``."""
    data = stream.read(n)
    if len(data) != n:
        raise EOFError
    return data


def write_message(stream: BinaryIO, value: Any) -> None:
    """Write a JSON value behind its length: 4 bytes, little-endian."""
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """The next message. Raises ``EOFError``."""
    (n,) = struct.unpack("<I", read_exactly(stream, 4))
    return json.loads(read_exactly(stream, n).decode("utf-8", "surrogatepass"))


def main(memory: int, confine: Callable[[int], str]) -> None:
    """Answer requests until their stream ends; ``memory``: bytes beyond what is mapped at the start. ``confine``:
    :func:`rollout_inspector.text.confinement.confine`. What it lacks is said in the first message."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for name in _LOADED_LATE:
        importlib.import_module(name)
    write_message(answers, {"ready": True, "lacks": confine(memory)})
    while True:
        try:
            request = read_message(requests)
        except EOFError:
            return
        if "expression" in request:
            limit_seconds(request["cpu_seconds"])
            write_message(answers, search(request))
            continue
        SandboxLimits.output_chars = request["output_chars"]
        SandboxLimits.cpu_seconds = request["cpu_seconds"]
        for job in request["jobs"]:
            answered = (answer_series if job["renders"] else answer)(request["template"], job)
            try:
                write_message(answers, answered)
            except MemoryError:
                write_message(answers, failure(MemoryError()))
                return
            if answered.get("kind") == "memory":
                # After its memory was full, a worker is not trusted with the next template.
                return
