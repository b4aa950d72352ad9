"""The process beside a worker that stores and judges what the worker samples.

The loop must answer an engine at once, and the diagnosis of a trajectory costs as much as a good part of sampling it.
So steps and ends go through a pipe to a process of their own, pile by pile: the larger the backlog, the fewer the
transactions. The process ends with its worker (the pipe closes); what it had received is stored then.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from rollouts.tasks.batch import Handshake, StorageBatch
from rollouts.tasks.store_batch import RunStorage

log = logging.getLogger(__name__)

NICE = 5
"""The engine and the loop go first where cores are scarce: what is stored a little later holds up nobody."""
# The worker decides when it ends, by closing the pipe (dying does): a signal to the whole group must not.
START = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    f"import os; os.nice({NICE}); "
    "import django; django.setup(); from rollouts.tasks import storage_process; storage_process.main()"
)
"""The program of the process. Not ``-m``: the package's models want the applications loaded first."""


class StorageProcessLost(Exception):
    """The process is gone; a new one can be given the same pile again."""


class StorageProcess:
    """One such process. Not thread-safe: it belongs to one run at a time."""

    def __init__(self) -> None:
        from django.conf import settings
        from django.db import connection

        ours, theirs = Pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(
            path for path in (str(settings.BASE_DIR), os.environ.get("PYTHONPATH", "")) if path
        )
        command = [sys.executable, "-c", START, str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, cwd=settings.BASE_DIR
        )
        theirs.close()
        self._pipe = ours
        names = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        self._send(Handshake({name: connection.settings_dict[name] for name in names}))

    def write(self, batch: StorageBatch) -> None:
        """Store a pile; returns when it is stored. Raises :class:`StorageProcessLost`, or what the storing raised."""
        self._send(batch)
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise StorageProcessLost(
                f"The process that stores results ended (exit status {self._process.poll()})."
            ) from error
        if answer is not None:
            raise answer

    def forget(self) -> None:
        """The run is over: nothing of it is kept in memory, and no connection to the database stays open."""
        self._send(None)

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise StorageProcessLost("The process that stores results does not listen any more.") from error


_idle: list[StorageProcess] = []
_lock = threading.Lock()


def take() -> StorageProcess:
    """A process that has no run: a warm one if there is one."""
    with _lock:
        if _idle:
            return _idle.pop()
    return StorageProcess()


def give_back(storage: StorageProcess) -> None:
    """Keep a process warm for the next run."""
    try:
        storage.forget()
    except StorageProcessLost:
        storage.close()
        return
    with _lock:
        _idle.append(storage)


def close_idle() -> None:
    """End the processes that have no run."""
    with _lock:
        stopped, _idle[:] = list(_idle), []
    for storage in stopped:
        storage.close()


class StorageClient:
    """The scribe of one run, taken when something is to be written; a lost one is replaced once a pile."""

    def __init__(self) -> None:
        self._storage: StorageProcess | None = None

    def write(self, batch: StorageBatch) -> None:
        try:
            self._at_hand().write(batch)
        except StorageProcessLost:
            log.warning("scribe lost; starting another", exc_info=True)
            self._drop()
            self._at_hand().write(batch)

    def close(self) -> None:
        if self._storage is not None:
            give_back(self._storage)
            self._storage = None

    def _at_hand(self) -> StorageProcess:
        if self._storage is None:
            self._storage = take()
        return self._storage

    def _drop(self) -> None:
        if self._storage is not None:
            self._storage.close()
            self._storage = None


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Store what comes until the pipe closes."""
    from django.db import connection

    held: RunStorage | None = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, Handshake):
            connection.close()
            connection.settings_dict.update(message.database)
            continue
        if message is None:
            held = None
            connection.close()
            continue
        try:
            if held is None or held.run_id != message.run:
                held = RunStorage(message.run)
            held.write(message)
            answer = None
        except Exception as error:
            log.exception("pile not stored run=%s", message.run)
            connection.close()
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return  # the worker is gone, and what it had sent is stored


def main() -> None:
    """Serve the pipe whose descriptor is the only argument."""
    serve(Connection(int(sys.argv[1])))
