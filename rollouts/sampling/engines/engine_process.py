"""An engine in a separate process beside the worker.

An engine needs the interpreter a few thousand times a second. Other work in the same process makes it wait: parsing
completions, rendering tool messages, work for the database. So an engine that computes on this machine runs alone.
Requests and completions cross a pipe; the engine's thread reads and writes the pipe itself, between two steps. When
memory runs out, the operating system kills this process. The worker lives on, starts another engine and asks it again.
"""

import contextlib
import logging
import logging.handlers
import os
import pickle
import select
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from rollout_inspector.text.processes import PipedProcess, ProcessEnded, pipe_to_parent
from rollouts.sampling.engines import ENGINES, EngineError, reason
from rollouts.sampling.engines.engine_owner import EngineLost, EngineNotBuilt, EngineOwner, Life
from rollouts.sampling.engines.engine_thread import EngineDriver

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0  # How long the engine may take to end after its worker is gone.
_NOBODY = -1  # The number of a message that answers no question.


class EngineProcess(EngineOwner):
    """An :class:`~rollouts.sampling.engines.engine_owner.EngineOwner` whose engine runs in a separate process.
    ``build``, the argument of ``call`` and its result are pickled. Each life of the engine is one process. When an
    engine dies its process ends too, so its memory is free before the next engine is built."""

    def _begin(self) -> Life:
        return _ProcessLife(self)

    def _packed(self, message: tuple[str, int | None, Any] | None) -> bytes:
        return pickle.dumps(message)


class _ProcessLife:
    """One process, from its start to its end. One thread reads what comes back, another writes what is asked. The
    process reads between two steps, so the writing thread may wait for it. The threads that ask never wait."""

    def __init__(self, owner: EngineProcess) -> None:
        self._owner = owner
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        self.send = self._outbox.put
        # A command's standard output is its result, so the output of the engine goes to the standard error.
        self._child = PipedProcess("The engine's process", __name__, stdout=sys.__stderr__)
        name = owner._name
        self.send(pickle.dumps((dict(ENGINES), owner._build, name)))
        self._thread = threading.Thread(target=self._listen, name=f"{name}-listener", daemon=True)
        self._thread.start()
        threading.Thread(target=self._write, name=f"{name}-writer", daemon=True).start()

    def end(self, timeout: float | None) -> None:
        self._child.end(timeout)
        self._thread.join(timeout)

    def _write(self) -> None:
        """Write all that has gathered as one message, so that the engine reads it at once."""
        with contextlib.suppress(ProcessEnded):  # the listening thread notices it
            while first := self._outbox.get():
                messages = [first]
                while not self._outbox.empty():
                    messages.append(self._outbox.get())
                self._child.send(messages)

    def _listen(self) -> None:
        error: EngineError | None = None
        try:
            while error is None:
                for number, kind, value in self._child.receive():
                    if kind == "lost":  # the last answer
                        error = value
                    elif kind == "ready":
                        self._owner._ready()
                    elif kind == "log":
                        logging.getLogger(value.name).handle(value)
                    else:
                        self._owner._told(number, kind, value)
        except ProcessEnded as ended:
            error = EngineLost(str(ended))
        except Exception as fault:  # an exception that cannot be rebuilt from its pickle
            error = EngineLost(f"The answer of the engine's process cannot be read: {reason(fault)}")
        self._child.end()  # it holds nothing worth keeping, and its memory is needed
        self._outbox.put(b"")
        self._child.pipe.close()
        self._owner._ended(error)


# -- in the process ----------------------------------------------------------------------------------------------------


Answer = tuple[int, str, Any]


def serve(pipe: Connection) -> None:
    """Own the engine that the first message tells how to build, until the pipe closes or a message ends it."""
    threading.Thread(target=_leave_with_worker, args=(pipe.fileno(),), daemon=True).start()
    sending = threading.RLock()  # reentrant: a log record may arise while an answer is sent

    def send(answers: list[Answer]) -> None:
        try:
            with sending:
                pipe.send(answers)
        except OSError:
            pass  # the worker is gone, and this process ends soon
        except Exception as error:  # the result or exception of a call cannot be pickled
            if len(answers) > 1:
                for answer in answers:
                    send([answer])
            else:
                fault = EngineError(f"The answer cannot leave the engine's process: {reason(error)}")
                send([(answers[0][0], "failed", fault)])

    messages = deque(pipe.recv())
    engines, build, name = pickle.loads(messages.popleft())
    ENGINES.update(engines)
    # Log records go to the worker, which writes them in its own form.
    forward = logging.handlers.QueueHandler(SimpleQueue())
    forward.enqueue = lambda record: send([(_NOBODY, "log", record)])  # type: ignore[method-assign]
    logging.root.addHandler(forward)
    logging.root.setLevel(logging.INFO)
    answers: list[Answer] = []
    try:
        driver = EngineDriver(build, name, lambda *answer: answers.append(answer))
    except EngineNotBuilt as error:
        send([(_NOBODY, "lost", error)])
        return
    send([(_NOBODY, "ready", None)])
    arrives = select.poll()
    arrives.register(pipe, select.POLLIN)
    while True:
        while messages or driver.is_idle() or arrives.poll(0):
            if not messages:
                try:
                    messages.extend(pipe.recv())
                except (EOFError, OSError):
                    messages.append(pickle.dumps(None))
            message = pickle.loads(messages.popleft())
            if message is None:
                driver.close()
                return
            driver.take(*message)
        try:
            driver.turn()
        except EngineLost as lost:
            send([*answers, (_NOBODY, "lost", lost)])
            return
        if answers:
            send(answers)
            answers.clear()


def _leave_with_worker(descriptor: int) -> None:
    """End the process some time after the worker's, even while the engine computes."""
    pipe = select.poll()
    pipe.register(descriptor, 0)  # poll reports a closed pipe without being asked for it
    pipe.poll()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve the worker that started this process."""
    serve(pipe_to_parent())
    os._exit(0)  # an engine that does not end in time must not keep its process alive
