"""The process beside a worker that stores and diagnoses what the worker samples.

The loop must answer an engine at once, and the diagnosis of a trajectory costs as much as a good part of sampling it.
So steps and ends go through a pipe to a process of their own, batch by batch: the larger the backlog, the fewer the
transactions. The process ends with its worker, because the pipe closes; what it had received is stored then.
"""

from __future__ import annotations

import logging
import threading
from multiprocessing.connection import Connection

from django.conf import settings
from django.db import connection

from rollouts.processes import PipedProcess, ProcessEnded, pipe_to_parent
from rollouts.tasks.batch import Handshake, StorageBatch
from rollouts.tasks.store_batch import RunStorage

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
NICE = 5
"""Where cores are scarce the engine and the loop go first: nobody waits for what is stored a little later."""
PREPARE = f"import os; os.nice({NICE}); import django; django.setup(); "
"""Statements at the start of the process. Models can be imported after ``setup`` alone."""


class StorageProcess:
    """One such process. Not thread-safe: it belongs to one run at a time."""

    def __init__(self) -> None:
        self._child = PipedProcess(
            "The process that stores results", __name__, PREPARE, {"OMP_NUM_THREADS": "1"}, cwd=settings.BASE_DIR
        )
        names = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        self._child.send(Handshake({name: connection.settings_dict[name] for name in names}))

    def write(self, batch: StorageBatch) -> None:
        """Store a batch; returns when it is stored. Raises ``ProcessEnded``, or what the storing raised."""
        self._child.send(batch)
        answer = self._child.receive()
        if answer is not None:
            raise answer

    def forget(self) -> None:
        """The run is over: nothing of it is kept in memory, and no connection to the database stays open."""
        self._child.send(None)

    def close(self) -> None:
        self._child.close(CLOSE_SECONDS)


_idle: list[StorageProcess] = []
_lock = threading.Lock()


def take() -> StorageProcess:
    """Returns a process that has no run: a warm one if there is one."""
    with _lock:
        if _idle:
            return _idle.pop()
    return StorageProcess()


def give_back(storage: StorageProcess) -> None:
    """Keep a process warm for the next run."""
    try:
        storage.forget()
    except ProcessEnded:
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
    """The storage process of one run, taken with the first batch. A lost one is replaced once a batch."""

    def __init__(self) -> None:
        self._storage: StorageProcess | None = None

    def write(self, batch: StorageBatch) -> None:
        try:
            self._at_hand().write(batch)
        except ProcessEnded:
            log.warning("storage process lost; starting another", exc_info=True)
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
            log.exception("batch not stored run=%s", message.run)
            connection.close()
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return  # the worker is gone, and what it had sent is stored


def main() -> None:
    """Serve the worker that started this process."""
    serve(pipe_to_parent())
