"""An engine in a process of its own, beside the worker.

An engine needs the interpreter a few thousand times a second. Whatever else runs in its process makes it wait: parsing
completions, rendering tool messages, taking part in the database's work. So what computes here computes alone, and
requests and completions cross a pipe. A process is also what an operating system kills when memory runs out: then the
engine's trajectories fail with that reason, and the worker lives on and starts another.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rollouts.engines import ENGINES, Engine, EngineError, Generation, GenerationRequest, reason
from rollouts.engines.worker import EngineClosed, EngineFacts, EngineLost, EngineThread, Result

log = logging.getLogger(__name__)

# The worker decides when it ends, by closing the pipe (dying does): a signal to the whole group must not.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "from rollouts.engines import process; process.main()"
)
"""The program of the process. Not ``-m``: what is pickled names this module by its own name."""
ROOT = Path(__file__).resolve().parents[2]
CLOSE_SECONDS = 10.0
"""How long an engine that is told to end may take, before its process is killed."""
_NOBODY = -1
"""In the place of a question's number: what was not asked for."""


class EngineProcess:
    """An :class:`~rollouts.engines.worker.EngineOwner` with the engine in a process of its own.

    ``build`` and what is given to ``call`` are pickled, and so is what a call gives. Each life of the engine is one
    process: an engine that died takes its process along, and what it held is free before the next one is built.
    """

    def __init__(self, build: Callable[[], Engine], name: str = "engine") -> None:
        self._build, self._name = build, name
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._closing = False
        self.tokens = 0

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        return self._ask("submit", request)

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        return self._ask("call", work)

    def ask_facts(self) -> Future[EngineFacts]:
        return self.call(EngineFacts.of)

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            if self._life is not None:
                self._life.send(("abort", 0, list(request_ids)))

    def close(self, timeout: float | None = 30) -> None:
        with self._lock:
            self._closing = True
            life = self._life
            if life is not None:
                life.send(None)
        if life is not None:
            life.end(timeout)

    def _ask(self, kind: str, value: Any) -> Future[Any]:
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is shutting down.")
            if self._life is None:
                self._life = _Life(self._build, self._name, self._ended, self._counted)
            return self._life.ask(kind, value)

    def _counted(self, n_tokens: int) -> None:
        self.tokens += n_tokens

    def _ended(self, life: _Life, error: EngineError) -> None:
        """The process is gone: nothing more is asked of it, then everybody who waits hears why."""
        with self._lock:
            if self._life is life:
                self._life = None
            if self._closing:
                error = EngineClosed("The engine was shut down before the completion was finished.")
            due = list(life.due.values())
            life.due.clear()
        for future in due:
            future.set_exception(error)


class _Life:
    """One process, from its start to its end; its thread hears what comes back."""

    def __init__(
        self,
        build: Callable[[], Engine],
        name: str,
        on_end: Callable[[_Life, EngineError], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        self._on_end, self._on_tokens, self._name = on_end, on_tokens, name
        self.due: dict[int, Future[Any]] = {}
        self._numbers = count()
        self._pipe, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        # A command's standard output is its result; what an engine says goes where the logs go.
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno())],
            env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sys.__stderr__,
        )  # fmt: skip
        theirs.close()
        self.send((dict(ENGINES), build, name))
        self._thread = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._thread.start()

    def ask(self, kind: str, value: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self.due[number] = future
        self.send((kind, number, value))
        return future

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone; the thread that listens has heard, or will
            self._pipe.send(message)

    def end(self, timeout: float | None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join(timeout)

    def _listen(self) -> None:
        error: EngineError | None = None
        try:
            while error is None:
                error = self._heard(*self._pipe.recv())
        except (EOFError, OSError):
            pass
        except Exception as fault:  # an exception that cannot be built again from its pickle
            error = EngineLost(f"What the engine's process answered cannot be read: {reason(fault)}")
        if error is not None:
            self._process.kill()  # there is nothing in it that would be missed, and its memory is wanted
        status = self._process.wait()
        self._pipe.close()
        self._on_end(self, error or EngineLost(f"The engine's process ended: {_how(status)}."))

    def _heard(self, number: int, kind: str, value: Any) -> EngineError | None:
        """Take an answer; gives the error that ended the engine."""
        if kind == "lost":
            error: EngineError = value
            return error
        if kind == "log":
            logging.getLogger(value.name).handle(value)
            return None
        future = self.due.pop(number, None)
        if future is None:
            return None
        if kind == "cancelled":
            future.cancel()
        elif kind == "failed":
            future.set_exception(value)
        else:
            if isinstance(value, Generation):
                self._on_tokens(len(value.completion_ids))
            future.set_result(value)
        return None


def _how(status: int) -> str:
    if status == -9:
        return "it was killed (signal 9), perhaps because the machine was out of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Own the engine that the first message tells how to build, until the pipe closes or says so."""
    engines, build, name = pipe.recv()
    ENGINES.update(engines)
    sending = threading.RLock()  # a log record may be about what is being sent

    def send(number: int, kind: str, value: Any) -> None:
        try:
            with sending:
                pipe.send((number, kind, value))
        except OSError:
            pass  # the worker is gone, and so will this process be
        except Exception as error:  # what somebody's call gave or raised cannot be pickled
            send(number, "failed", EngineError(f"The answer cannot leave the engine's process: {reason(error)}"))

    # What is logged here is the worker's to write, in its own form.
    logging.root.addHandler(_Forward(send))
    logging.root.setLevel(logging.INFO)

    def answer(number: int, future: Future[Any]) -> None:
        try:
            send(number, "done", future.result())
        except CancelledError:
            send(number, "cancelled", None)
        except EngineLost:
            pass  # the worker has been told, and tells everybody
        except Exception as error:
            send(number, "failed", error)

    owner = EngineThread(build, name, partial(send, _NOBODY, "lost"))
    try:
        while (message := pipe.recv()) is not None:
            kind, number, value = message
            if kind == "abort":
                owner.abort(value)
            else:
                future: Future[Any] = owner.submit(value) if kind == "submit" else owner.call(value)
                future.add_done_callback(partial(answer, number))
    except EOFError:
        pass
    owner.close(CLOSE_SECONDS)


class _Forward(logging.handlers.QueueHandler):
    def __init__(self, send: Callable[[int, str, Any], None]) -> None:
        super().__init__(send)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(_NOBODY, "log", record)


def main() -> None:
    """Serve the pipe whose descriptor is the only argument."""
    serve(Connection(int(sys.argv[1])))
    os._exit(0)  # an engine that would not end in time does not keep its process
