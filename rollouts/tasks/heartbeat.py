"""Heartbeats: a thread writes the heartbeat of work and reads its cancel flag, so no work waits for the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import DatabaseError, connection

log = logging.getLogger(__name__)

CANCEL_SECONDS = 0.25
"""How often the cancel flag is read."""


class Heartbeat:
    """Calls ``beat`` every ``seconds``, and sets ``cancelled`` as soon as ``is_cancelled`` returns True."""

    def __init__(
        self, name: str, beat: Callable[[], object], seconds: float, is_cancelled: Callable[[], bool] | None = None
    ) -> None:
        self._beat, self._seconds, self._is_cancelled = beat, seconds, is_cancelled
        self._end = threading.Event()
        self.cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"heartbeat-{name}", daemon=True)

    def __enter__(self) -> Heartbeat:
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
                except DatabaseError:
                    # A busy database is asked again. If it does not come back, saving the results ends the work.
                    log.warning("heartbeat missed thread=%s", self._thread.name, exc_info=True)
                    connection.close()
        finally:
            connection.close()


def repeat(name: str, seconds: float, stop: threading.Event, do: Callable[[], object]) -> None:
    """Call ``do`` every ``seconds`` in a thread of its own until ``stop`` is set; what it raises is logged."""

    def watch() -> None:
        while not stop.wait(seconds):
            try:
                do()
            except Exception:
                log.warning("thread %s goes on after an error", name, exc_info=True)
            finally:
                connection.close()

    threading.Thread(target=watch, name=name, daemon=True).start()
