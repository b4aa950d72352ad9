"""Heartbeats: a thread writes the heartbeat of work and reads its cancel flag, so no work waits for the database."""

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from celery import signals
from celery.utils.nodenames import worker_direct
from django.db import connection

log = logging.getLogger(__name__)

CANCEL_SECONDS = 0.25  # How often the cancel flag is read.


class Heartbeat:
    """Calls ``beat`` every ``seconds``, and sets ``cancelled`` as soon as ``is_cancelled`` returns True."""

    def __init__(
        self, name: str, beat: Callable[[], object], seconds: float, is_cancelled: Callable[[], bool] | None = None
    ) -> None:
        self._beat, self._seconds, self._is_cancelled = beat, seconds, is_cancelled
        self._end = threading.Event()
        self.cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"heartbeat-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = self._seconds if self._is_cancelled is None else CANCEL_SECONDS
        waited = 0.0
        try:
            while not self._end.wait(pause):
                waited += pause
                try:
                    if self._is_cancelled is not None and self._is_cancelled():
                        self.cancelled.set()
                    if waited >= self._seconds:
                        self._beat()
                        waited = 0.0
                except Exception:
                    # A busy database is asked again. If it does not come back, saving the results ends the work.
                    log.warning("heartbeat missed thread=%s", self._thread.name, exc_info=True)
                    connection.close()
        finally:
            connection.close()


shutting_down = threading.Event()
"""Set when this worker begins to stop: runs stop at their next poll, save what they have and release their leases."""
signals.worker_shutting_down.connect(lambda **_: shutting_down.set(), weak=False)


def queues_of(worker: Any) -> list[str]:
    """The names of the queues that a Celery worker consumes and others may read too: not the one of its own."""
    names = [queue.name for queue in worker.task_consumer.queues] if worker.task_consumer else []
    return [name for name in names if name != worker_direct(worker.hostname).name]


FORK_WAIT_SECONDS = 60.0  # How long a fork waits at most for the threads of :func:`repeat`.


class _Rest:
    """Keeps this process from forking while a thread of :func:`repeat` is at work. A pool that has lost a process forks
    another one. SQLite's own table of locks and every lock of Python are copied as they are. What another thread holds
    in that moment, the new process waits for as long as it lives."""

    def __init__(self) -> None:
        self._locks: list[threading.RLock] = []
        self._held: list[threading.RLock] = []
        os.register_at_fork(before=self._wait, after_in_parent=self._go_on, after_in_child=self._go_on)

    def lock(self) -> threading.RLock:
        """A lock for one thread, which holds it while it is at work. That thread itself may fork."""
        lock = threading.RLock()
        self._locks.append(lock)
        return lock

    def _wait(self) -> None:
        until = time.monotonic() + FORK_WAIT_SECONDS
        self._held = [lock for lock in self._locks if lock.acquire(timeout=max(until - time.monotonic(), 0))]

    def _go_on(self) -> None:
        while self._held:
            self._held.pop().release()


_rest = _Rest()


def repeat(name: str, seconds: float, do: Callable[[], object]) -> None:
    """Call ``do`` now and every ``seconds`` in a thread, while this worker lives. What it raises is logged. This
    process does not fork meanwhile, for up to ``FORK_WAIT_SECONDS``."""
    at_work = _rest.lock()

    def watch() -> None:
        while not shutting_down.is_set():
            with at_work:
                try:
                    do()
                except Exception:
                    log.warning("thread %s goes on after an error", name, exc_info=True)
                finally:
                    connection.close()
            shutting_down.wait(seconds)

    threading.Thread(target=watch, name=name, daemon=True).start()
