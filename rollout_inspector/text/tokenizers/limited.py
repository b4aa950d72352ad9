"""The process that holds one tokenizer: started at first use, limited in memory and time, ended when it is late.
Several threads may ask; a process answers one of them at a time. Forked processes start their own."""

import atexit
import os
import signal
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollout_inspector.text.processes import Faults, Late, LimitedProcess, ProcessEnded
from rollout_inspector.text.tokenizers import wire
from rollout_inspector.text.tokenizers.files import TokenizerUnusable

MAX_PROCESSES = 8
"""Tokenizers that this process keeps warm; each takes 100 to 300 MB. The one that rested longest ends first."""
LOAD_SECONDS = 30  # Processor seconds for loading. The largest tokenizers in use need ten.
TEXT_SECONDS, SECONDS_PER_MB = 3, 10
"""Processor seconds for a request, and for each million bytes of it. Slow encoders do one million in a second."""
REFERENCE_BYTES = 2_000_000
"""Text that the reference encodes before a faster encoder is loaded. That takes as long as 4 MB by the reference."""
PATIENCE, MAX_SECONDS = 10, 120.0
"""An overloaded machine may take so many times as long as the processor, up to so many seconds."""
START_SECONDS = 60.0
IDLE_SECONDS = 600.0  # A process that nobody asks for so long ends.
WAIT_SECONDS = 60.0  # How long a thread waits for its turn.

_PROGRAM = Path(__file__).parent / "worker" / "__main__.py"
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",  # each arena reserves address space, which is limited
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": str(min(8, os.cpu_count() or 1)),
}


class TokenizerBusy(TokenizerUnusable):
    """The tokenizer may be fine, but the machine has no time for it now. The message says to try again."""


class Turns:
    """At most ``n`` threads of this process at a time, each of which waits for ``seconds``."""

    def __init__(self, n: int, seconds: float, refusal: str) -> None:
        self._n, self._seconds, self._refusal = n, seconds, refusal
        self.forget()

    def forget(self) -> None:
        """After a fork: the threads that had a turn are not in this process."""
        self._free = threading.Semaphore(self._n)

    @contextmanager
    def one(self) -> Iterator[None]:
        """A turn. Raises :class:`TokenizerBusy`."""
        free = self._free
        if not free.acquire(timeout=self._seconds):
            raise TokenizerBusy(self._refusal)
        try:
            yield
        finally:
            free.release()


LOADS = Turns(4, WAIT_SECONDS, "Other tokenizers are being loaded, and the machine is busy. Try again in a minute.")
CHECKED_NICE = 10  # How much less urgent a process is that looks at a tokenizer which nobody has checked yet.
VALIDATIONS = Turns(2, 15.0, "Two other tokenizers are being checked. Try again in a minute.")
"""Fewer than ``LOADS``, so that tokenizers which nobody has checked yet do not keep the others waiting."""


class TokenizerProcess:
    """Asks the process of one tokenizer's folder."""

    def __init__(self, folder: Path, nice: int = 0) -> None:
        self.folder, self._nice = folder, nice
        self._process: LimitedProcess | None = None
        self._fast: LimitedProcess | None = None
        self._n_bytes = 0
        self.encoder = "tokenizers"  # What encodes: the reference, until there is much text.
        self._turn = threading.Lock()
        self._sha256: str | None = None
        self._faults = Faults()
        _all.add(self)

    def load(self) -> wire.Message:
        """Start the process; returns what it says about the tokenizer. Raises :class:`TokenizerUnusable`."""
        with self._my_turn():
            return self._start()[1]

    def ask(self, ask: str, *buffers: wire.Buffer, **fields: Any) -> wire.Message:
        """The answer to one request. Raises :class:`TokenizerUnusable` with a sentence."""
        seconds = TEXT_SECONDS + SECONDS_PER_MB * sum(map(len, buffers)) // 1_000_000
        head = {"ask": ask, **fields}
        with self._my_turn():
            if refusal := self._faults.refusal:
                raise TokenizerUnusable(refusal)
            try:
                return self._answer(self._running(), seconds, head, buffers)
            except ProcessEnded as error:
                if error.status in (0, -signal.SIGKILL):  # it had rested too long, or the machine was out of memory
                    with suppress(ProcessEnded):
                        return self._answer(self._start()[0], seconds, head, buffers)
                raise self._fault(_why(error.status, seconds, "a text")) from error
            except Late:
                raise self._fault("The tokenizer did not answer in time.") from None

    def close(self) -> None:
        """End the process, unless a thread waits for its answer. The next request starts another one."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()

    def forget(self) -> None:
        """After a fork: the process belongs to the parent."""
        if self._process is not None:
            self._process.forget()
        self._process, self._turn = None, threading.Lock()

    @contextmanager
    def _my_turn(self) -> Iterator[None]:
        turn = self._turn
        if not turn.acquire(timeout=WAIT_SECONDS):
            raise TokenizerBusy("The tokenizer is busy with other texts. Try again in a minute.")
        try:
            yield
        finally:
            turn.release()

    def _running(self) -> LimitedProcess:
        process = self._process
        if process is None or process.process.poll() is not None:
            return self._start()[0]
        _keep_warm(self)
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> tuple[LimitedProcess, wire.Message]:
        self._end()
        with LOADS.one():
            arguments = [str(_PROGRAM), str(IDLE_SECONDS), str(self._nice)]
            self._process = process = LimitedProcess("The tokenizer", arguments, _ENVIRONMENT)
            loaded = False
            try:
                process.receive(time.monotonic() + START_SECONDS)
                message = self._exchange(process, LOAD_SECONDS, {"folder": str(self.folder)})
                if self._sha256 not in (None, message[0]["sha256"]):
                    raise TokenizerUnusable("The files of the tokenizer have changed. Try again.")
                loaded = True
            except Late:
                raise TokenizerBusy(
                    "The tokenizer could not be loaded in time; the machine is overloaded. Try again."
                ) from None
            except ProcessEnded as error:
                kind = TokenizerBusy if error.status == -signal.SIGKILL else TokenizerUnusable
                raise kind(_why(error.status, LOAD_SECONDS, "loading")) from error
            finally:
                if not loaded:
                    self._end()
        self._sha256, self.encoder, self._n_bytes = message[0]["sha256"], "tokenizers", 0
        _keep_warm(self)
        return process, message

    def _answer(
        self, process: LimitedProcess, seconds: int, head: dict[str, Any], buffers: tuple[wire.Buffer, ...]
    ) -> wire.Message:
        """The answer of a process, which loads the fast encoder first where that is asked or there was much text."""
        self._n_bytes += sum(map(len, buffers))
        if process is not self._fast and (head["ask"] == "fastest" or self._n_bytes > REFERENCE_BYTES):
            self.encoder = self._exchange(process, LOAD_SECONDS, {"ask": "fastest"})[0]["encoder"]
            self._fast = process
        return self._exchange(process, seconds, head, buffers)

    def _exchange(
        self, process: LimitedProcess, seconds: int, head: dict[str, Any], buffers: tuple[wire.Buffer, ...] = ()
    ) -> wire.Message:
        deadline = time.monotonic() + min(PATIENCE * (seconds + 1), MAX_SECONDS)
        process.send(wire.pack({**head, "seconds": seconds}, *buffers), deadline)
        frame = process.receive(deadline)
        try:
            answered = wire.unpack(frame)
        except (ValueError, KeyError, TypeError):
            raise self._fault("The tokenizer's process sent no answer that can be read.") from None
        if sentence := answered[0].get("error"):
            raise self._fault(sentence) if answered[0].get("ends") else TokenizerUnusable(sentence)
        return answered

    def _fault(self, sentence: str) -> TokenizerUnusable:
        """End the process, because of what it did; returns the error to raise."""
        self._end()
        self._faults.add(sentence)
        return TokenizerUnusable(sentence)


def _why(status: int | None, seconds: int, work: str) -> str:
    if status == -signal.SIGXCPU:
        return f"The tokenizer used more than the {seconds} s of computing time that {work} may take."
    if status == -signal.SIGKILL:
        return "The process of the tokenizer was killed; perhaps the machine has too little memory. Try again."
    how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
    return f"The tokenizer brought its process down ({how}); perhaps it needs more memory than it may use."


_warm: OrderedDict[TokenizerProcess, None] = OrderedDict()
"""Those that have a process; the one that was asked last is at the end."""
_all: weakref.WeakSet[TokenizerProcess] = weakref.WeakSet()
_lock = threading.Lock()


def _keep_warm(one: TokenizerProcess) -> None:
    """Note that one was asked, and end those that rested longest if there are too many."""
    with _lock:
        _warm[one] = None
        _warm.move_to_end(one)
        for other in list(_warm)[: max(0, len(_warm) - MAX_PROCESSES)]:
            del _warm[other]
            other.close()


def close() -> None:
    """End the processes of all tokenizers; the next request to one starts it again."""
    with _lock:
        while _warm:
            _warm.popitem()[0].close()


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    LOADS.forget()
    VALIDATIONS.forget()
    _warm.clear()
    for process in _all:
        process.forget()


os.register_at_fork(after_in_child=_forget)
atexit.register(close)
