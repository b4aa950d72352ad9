"""Answers requests on the standard streams: four bytes of length, then JSON. Sets the limits of memory and time."""

from __future__ import annotations

import datetime
import json
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from .rendering import Clock, SandboxLimits, failure, render_plain, render_with_lines
from .resuming import ResumableRender, render_growing

Render = Callable[[str, dict[str, Any]], dict[str, Any]]


def answer(text: str, job: dict[str, Any], limit: bool = True, render: Render = render_plain) -> dict[str, Any]:
    """The outcome of one render as JSON. Without ``limit`` it shares the computing time of an earlier render."""
    if limit:
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SandboxLimits.cpu_seconds + 1, resource.RLIM_INFINITY))
    variables = dict(job["variables"])
    try:
        now = variables.pop("strftime_now", None)
        Clock.now = datetime.datetime.fromisoformat(now) if now else Clock.FIXED
        return (render_with_lines if job.get("lines") else render)(text, variables)
    except Exception as error:
        return failure(error)


def answer_series(text: str, job: dict[str, Any]) -> dict[str, Any]:
    """Many renders that share messages, as one job with one allowance of computing time.

    Each outcome is a failure, or ``[characters kept from the text before it, the rest, tracked spans kept from those
    before them, the ends of the rest]``.
    """
    base, messages, tools = job["variables"], job["messages"], job["tools"]
    outcomes: list[Any] = []
    before = ""
    spans_before: list[tuple[int, int]] = []
    earlier: ResumableRender | None = None
    for n, (indices, tools_index, kwargs, generation) in enumerate(job["renders"]):
        variables = {
            **base, **job["kwargs"][kwargs], "messages": [messages[index] for index in indices],
            "tools": None if tools_index is None else tools[tools_index], "add_generation_prompt": generation,
        }  # fmt: skip
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
        kept = len(before) if now.startswith(before) else 0
        n_kept = len(spans_before) if spans[: len(spans_before)] == spans_before else 0
        outcomes.append([kept, now[kept:], n_kept, [end for span in spans[n_kept:] for end in span]])
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


def _end_with_parent() -> None:
    """End this process soon after its parent has ended, because nobody reads its pipe then."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main(memory: int) -> None:
    """Answer requests until their stream ends; ``memory``: bytes beyond what is mapped at the start."""
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
            answers_to = answer_series if "renders" in job else answer
            answered = answers_to(request["template"], job)
            try:
                write_message(answers, answered)
            except MemoryError:
                write_message(answers, failure(MemoryError()))
                return
            if answered.get("kind") == "memory":
                # After its memory was full, a worker is not trusted with the next template.
                return
