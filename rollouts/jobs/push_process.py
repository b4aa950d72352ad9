"""The push process: it reads and stores what trainers push, beside each web process.

A body can take a processor for a minute, and all the memory that its limits allow. In the web process every page would
wait for it. Here it waits itself: the process is nice, its memory has a limit, and a body that ends it costs nobody
else anything. Only one body is read at a time. Plain JSON crosses the pipe, never a pickle, because a reader of hostile
bytes writes it.
"""

import contextlib
import gc
import json
import logging
import resource
import sys
import threading
from dataclasses import asdict
from typing import Any

from django.conf import settings
from django.db import DatabaseError, IntegrityError, connection

from rollout_inspector.formats import FileRefused, Source, TooLarge, limits
from rollout_inspector.formats.training_step import TrainingStepRule
from rollout_inspector.refusal import Refusal
from rollout_inspector.text.processes import PipedProcess, ProcessEnded, pipe_to_parent
from rollouts.jobs.pushes import take_push
from rollouts.store.models import Run
from rollouts.store.outages import disk_fault, is_outage, said_of
from rollouts.store.runs.runs import find_run

log = logging.getLogger(__name__)

NICE = 10  # Pages go first, because people wait for them.
MEMORY_BYTES = 2 << 30  # Private memory of the process. The limits of a push keep every known body below it.
KEPT_BYTES = 300 << 20  # A process that has grown by more ends after its answer. The next push starts another.
WAIT_SECONDS = 30.0  # How long a push waits for the one before it.
ANSWER_SECONDS = 240.0  # How long a push may take by the clock, with all waits for the database.
IDLE_SECONDS = 300.0  # The process ends when nothing was pushed for so long.
CLOSE_SECONDS = 2.0
PREPARE = f"import os; os.nice({NICE}); import django; django.setup(); "
"""Statements at the start of the process. Models can be imported only after ``setup``."""


PushAnswer = tuple[int, dict[str, Any]]
"""What a push is answered with: the HTTP status and the body, in which ``error`` says what was not read."""


class PushesBusy(Refusal):
    """Other pushes are being read. The message is a sentence."""


def answer(code: str, path: str, format_name: str, prefix: str, training_step: int | None) -> PushAnswer:
    """Read and store the body in a file, in this process. ``code``: of the run. ``format_name``: or ``auto``.
    ``training_step``: of all that is pushed; None = each record tells its own, or none. Raises what is neither the
    sender's fault nor an outage."""
    run = find_run(code=code)
    if run is None:
        return _deleted(code)
    source = Source.of_path(path, "The request body", alone=True)
    source.path = ""  # the file is ours, and its name says nothing
    try:
        pushed = take_push(run, source, format_name, prefix, TrainingStepRule(training_step))
    except FileRefused as error:
        status = 413 if isinstance(error, TooLarge) else 415 if source.size else 400
        return status, {"error": str(error)}
    except MemoryError:
        sentence = f"Reading the body needs more than {MEMORY_BYTES >> 20:,} MB of memory. {limits.BY_IMPORT}"
        return 413, {"error": sentence}
    except (Run.DoesNotExist, IntegrityError):
        if find_run(code=code) is not None:
            raise
        return _deleted(code)
    except (OSError, DatabaseError) as error:
        if not is_outage(error):
            raise
        return 507 if disk_fault(error) else 503, {"error": f"{said_of(error)} Push again later."}
    result = {name: value for name, value in asdict(pushed).items() if value is not None}
    return 413 if pushed.is_too_large else 400 if pushed.error else 200, result


def _deleted(code: str) -> PushAnswer:
    sentence = f"The run {code} was deleted while you pushed to it. POST /api/runs makes one."
    return 410, {"error": sentence}


# -- in the web process


class PushProcess:
    """The push process of this process. Any thread may ask it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: PipedProcess | None = None

    def ask(self, *body: str | int | None) -> PushAnswer:
        """Have a body read and stored: what :func:`answer` takes. Raises :class:`PushesBusy` when others are read for
        ``WAIT_SECONDS``."""
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise PushesBusy("The server reads other pushes. Push again later.")
        try:
            child = self._child = self._living()
            child.pipe.send_bytes(json.dumps(body).encode())
            if not child.pipe.poll(ANSWER_SECONDS):
                self.close()
                return 503, {"error": f"The push was not stored within {ANSWER_SECONDS:g} s. Push again."}
            reply = json.loads(child.pipe.recv_bytes())
            if reply["is_last"]:
                self.close()
            return reply["status"], reply["body"]
        except (EOFError, OSError, ProcessEnded) as error:
            log.warning("the push process ended run=%s", body[0], exc_info=error)
            self.close()
            sentence = "The process that reads pushes ended. Push again; if this repeats, push smaller parts."
            return 503, {"error": sentence}
        finally:
            self._lock.release()

    def _living(self) -> PipedProcess:
        if self._child is not None and self._child.process.poll() is None:
            return self._child
        self.close()
        child = PipedProcess(
            "The process that reads pushes", __name__, PREPARE, {"OMP_NUM_THREADS": "1"}, cwd=settings.BASE_DIR
        )
        # A test's database is not the one of the settings.
        names = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        database = {name: str(connection.settings_dict[name]) for name in names}
        child.pipe.send_bytes(json.dumps(database).encode())
        return child

    def close(self) -> None:
        """End the process. The next push starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.close(CLOSE_SECONDS)


_process = PushProcess()
ask, close = _process.ask, _process.close


# -- in the push process


def main() -> None:
    """Answer the web process that started this process, until it closes its pipe or asks nothing more."""
    pipe = pipe_to_parent()
    _limit_memory()
    most = _most_memory()
    gc.freeze()
    gc.set_threshold(100_000)  # reading makes many objects and hardly any cycle
    with contextlib.suppress(EOFError, OSError):
        connection.settings_dict.update(json.loads(pipe.recv_bytes()))
        while pipe.poll(IDLE_SECONDS):
            body = json.loads(pipe.recv_bytes())
            try:
                status, result = answer(*body)
            except Exception:
                log.exception("push not stored run=%s", body[0])
                status, result = 500, {"error": "The push could not be stored. The log of the web server says why."}
            connection.close()
            is_last = _most_memory() - most > KEPT_BYTES
            pipe.send_bytes(json.dumps({"status": status, "body": result, "is_last": is_last}).encode())


def _most_memory() -> int:
    """The most bytes of memory that this process, or the one that started it, has held at a time."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limit_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
