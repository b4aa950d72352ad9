"""Runs what strangers wrote in subprocesses: small pools of warm workers, each with limits on time, memory and output.

Templates are rendered here; ``rollout_inspector.text.expressions`` searches. Nothing can stop a pool: each answer comes
within ``WALL_SECONDS``, as a value or a sentence. Threads and forked processes may ask: each process has its own pools,
and a worker ends with the process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.processes import Late, LimitedProcess, ProcessEnded

CPU_SECONDS = 2
QUICK_SECONDS, WALL_SECONDS = 0.2, 2.7
STARVED_SECONDS, STARVED_WALL_SECONDS = 0.5, 10.0
"""A render that got less computing time than this gets more time, because the machine is overloaded."""
MEMORY_BYTES = 400_000_000  # Memory of a worker beyond what it maps at its start.
OUTPUT_CHARS = 4_000_000
TEMPLATE_CHARS = 1_000_000
BATCH_SECONDS = 30.0
START_SECONDS = 60.0  # A worker that takes longer to start is given up: then the machine is overloaded.
_TICKS = os.sysconf("SC_CLK_TCK")
_PROGRAM = Path(__file__).parent / "worker" / "__main__.py"


@dataclass(frozen=True)
class RenderJob:
    """One render, or a series: many renders of conversations that share messages, with the limits of one render."""

    variables: Mapping[str, Any]
    """What the template sees. ``strftime_now`` is an ISO date and time: what the function of that name tells."""
    lines: bool = False  # Ask for provenance: which line wrote each character. Not of a series.
    messages: Sequence[Any] = ()  # Of a series: every message of the renders once.
    tools: Sequence[Any] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    renders: Sequence[tuple[Sequence[int], int | None, int, bool]] = ()
    """Of a series: (indices into ``messages``, index into ``tools``, index into ``kwargs``, generation prompt)."""


@dataclass(frozen=True)
class Rendered:
    """The outcome of a job: ``text``, or a sentence in ``error``."""

    text: str = ""
    error: str = ""
    kind: str = ""
    """Of a failure: ``raises``, ``syntax``, ``forbidden``, ``time``, ``memory``, ``size``, ``depth``, ``crash``."""
    line: int | None = None  # Of a failure: the template line, where known.
    lines: tuple[tuple[int, int], ...] = ()
    """(number of characters, 1-based template line) in order; line 0 = not known."""
    spans: tuple[tuple[int, int], ...] = ()
    """Characters ``[start, stop)`` that generation blocks wrote; only with ``lines``."""
    tracked_spans: tuple[tuple[int, int], ...] = ()
    """The same as ``transformers`` counts them, which is wrong inside macros."""
    series: tuple[Rendered, ...] = ()  # Of a series: the outcome of each render.
    ids: Ids | None = field(default=None, compare=False)  # Of a renderer that writes ids; None = the text is encoded.

    @property
    def ok(self) -> bool:
        """Whether there is a text."""
        return not self.error

    @property
    def spoils(self) -> bool:
        """Whether a worker was ended for it."""
        return self.kind in ("memory", "time", "crash")

    def or_raise(self) -> Rendered:
        """This outcome, or :class:`RenderFailed` with its sentence."""
        if self.error:
            raise RenderFailed(self.error)
        return self

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(n for n, _ in self.lines))

    def line_at(self, character: int) -> int | None:
        """The template line that wrote a character; at the end of the text, the line that wrote the last character."""
        if not self.lines:
            return None
        index = min(bisect_right(self._stops, character), len(self.lines) - 1)
        return self.lines[index][1] or None


class Worker(LimitedProcess):
    """One subprocess. The constructor raises :class:`RenderFailed` where it does not start. JSON alone crosses its
    standard streams, because it runs what strangers wrote."""

    spoilt = False  # It is not trusted with the next request.

    def __init__(self, work: str) -> None:
        super().__init__(f"The sandbox for {work}", [str(_PROGRAM), str(MEMORY_BYTES)])
        try:
            self.receive(time.monotonic() + START_SECONDS)
        except (ProcessEnded, Late) as error:
            self.close()
            raise RenderFailed(
                f"The sandbox for {work} could not be started; the machine may be overloaded. Try again."
            ) from error

    def ask(self, value: Any, until: float) -> None:
        """Send a request. Raises :class:`RenderFailed` for a value that is no JSON, ``Late`` or ``ProcessEnded``."""
        try:
            data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderFailed(f"The conversation, its tools or its kwargs are not plain JSON: {error}") from error
        self.send(data, until)

    def answer(self, until: float) -> Any:
        """The next message, within ``WALL_SECONDS``, or ``STARVED_WALL_SECONDS`` if the worker gets no computing time.
        Raises ``Late`` or ``ProcessEnded``."""
        asked_at, used = time.monotonic(), 0.0
        for seconds in (QUICK_SECONDS, WALL_SECONDS, WALL_SECONDS + STARVED_WALL_SECONDS):
            with suppress(Late):
                data = self.receive(min(until, asked_at + seconds))
                return json.loads(data.decode("utf-8", "surrogatepass"))
            used = self.cpu_seconds() - used  # since the time before; slow to read, and most answers are quick
            # A template cannot sleep. If it has hardly computed, it is not slow: its worker had to wait.
            if seconds == WALL_SECONDS and used > STARVED_SECONDS:
                break
        raise Late

    def cpu_seconds(self) -> float:
        """Seconds of computing time that the worker has used so far."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS


class Pool:
    """The workers of this process for one kind of work."""

    def __init__(self, work: str, size: int = 2) -> None:
        self._work = work
        self.idle: list[Worker] = []
        self.slots, self.lock = threading.Semaphore(size), threading.Lock()

    def _take(self) -> Worker:
        with self.lock:
            while self.idle:
                worker = self.idle.pop()
                if worker.process.poll() is None:
                    return worker
                worker.close()
        return Worker(self._work)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker that nobody else uses meanwhile. It is ended where the body raises, or calls it ``spoilt``."""
        with self.slots:
            worker = self._take()
            is_fit = False
            try:
                yield worker
                is_fit = not worker.spoilt and worker.process.poll() is None
            finally:
                if is_fit:
                    with self.lock:
                        self.idle.append(worker)
                else:
                    worker.close()

    def render(self, chat_template: str, jobs: Sequence[RenderJob]) -> list[Rendered]:
        """The outcome of each job, in order. A template that fails is an outcome, not an exception."""
        if len(chat_template) > TEMPLATE_CHARS:
            sentence = f"The chat template has more than {TEMPLATE_CHARS:,} characters."
            return [Rendered(error=sentence, kind="size")] * len(jobs)
        if not jobs:
            return []
        with self.worker() as worker:
            outcomes = self._run(worker, chat_template, jobs)
            worker.spoilt = len(outcomes) < len(jobs) or any(outcome.spoils for outcome in outcomes)
        if len(outcomes) < len(jobs):
            last = outcomes[-1]
            if last.kind == "memory":
                # The worker ends after its memory was full; the other renders may be harmless.
                return [*outcomes, *self.render(chat_template, jobs[len(outcomes) :])]
            sentence = f"Not rendered, because an earlier render of the same template failed. {last.error}"
            outcomes += [Rendered(error=sentence, kind=last.kind)] * (len(jobs) - len(outcomes))
        return outcomes

    def _run(self, worker: Worker, chat_template: str, jobs: Sequence[RenderJob]) -> list[Rendered]:
        """Outcomes up to and including the one that ended the worker."""
        outcomes: list[Rendered] = []
        request = {
            "template": chat_template, "output_chars": OUTPUT_CHARS, "cpu_seconds": CPU_SECONDS,
            "jobs": [vars(job) for job in jobs],
        }
        until = time.monotonic() + BATCH_SECONDS
        try:
            worker.ask(request, until)
            while len(outcomes) < len(jobs) and not (outcomes and outcomes[-1].kind == "memory"):
                outcomes.append(_outcome(worker.answer(until)))
        except Late:
            sentence = f"The template ran longer than the {WALL_SECONDS:g} s that a render may take."
            outcomes.append(Rendered(error=sentence, kind="time"))
        except ProcessEnded as error:
            outcomes.append(_death(error.status))
        return outcomes

    def close(self) -> None:
        with self.lock:
            while self.idle:
                self.idle.pop().close()


def _outcome(message: Mapping[str, Any]) -> Rendered:
    if "error" in message:
        return Rendered(**message)
    if "series" in message:
        return Rendered(series=tuple(_series(message["series"])))
    lines, spans, tracked = (tuple(map(tuple, message.get(it, ()))) for it in ("lines", "spans", "tracked_spans"))
    return Rendered(text=message["text"], lines=lines, spans=spans, tracked_spans=tracked)


def _series(outcomes: Sequence[Any]) -> Iterator[Rendered]:
    text = ""
    spans: tuple[tuple[int, int], ...] = ()
    for outcome in outcomes:
        if isinstance(outcome, Mapping):
            yield _outcome(outcome)
            continue
        prefixes, suffixes, n_kept, ends = outcome
        text = text[:prefixes] + suffixes
        if ends or n_kept != len(spans):
            spans = (*spans[:n_kept], *zip(ends[::2], ends[1::2], strict=True))
        yield Rendered(text, tracked_spans=spans)


def _death(status: int | None) -> Rendered:
    if status == -signal.SIGXCPU:
        return Rendered(error=f"The template used more than {CPU_SECONDS} s of computing time.", kind="time")
    if status is not None and status < 0:
        sentence = (
            f"The template brought the sandbox down (signal {-status}); it nests too deep or uses too much memory."
        )
        return Rendered(error=sentence, kind="crash")
    return Rendered(error="The template brought the sandbox down; it uses too much memory.", kind="crash")


_pools: dict[str, Pool] = {}
_pool_lock = threading.Lock()


def pool(work: str = "chat templates") -> Pool:
    """This process's pool for a kind of work, so that no kind waits for another."""
    with _pool_lock:
        return _pools.setdefault(work, Pool(work))


def _forget() -> None:
    """After a fork: the workers belong to the parent, so the child starts without a pool."""
    global _pools, _pool_lock
    _inherited.append(_pools)
    _pools, _pool_lock = {}, threading.Lock()


_inherited: list[dict[str, Pool]] = []
"""Pools of parents. They are kept, so that the child neither closes nor waits for a worker of its parent."""


def close() -> None:
    """End this process's workers; the next request starts new ones."""
    with _pool_lock:
        while _pools:
            _pools.popitem()[1].close()


def render(chat_template: str, jobs: Sequence[RenderJob]) -> list[Rendered]:
    """Render a template many times in one round trip; the outcome of each job, in order."""
    return pool().render(chat_template, jobs)


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
