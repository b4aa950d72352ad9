"""The sign of life of a run under way, and the flags that end it: one thread, so that neither loop nor engine waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import DatabaseError, connection
from django.utils import timezone

from rollouts.models import Run

log = logging.getLogger(__name__)

CANCEL_SECONDS = 0.25
"""How often the cancel flag is read."""
BEAT_SECONDS = 3.0
"""How often the heartbeat is written and the leases are renewed."""


class Heartbeat:
    """Watches one run. ``cancelled`` is set when somebody asked for its end, or it has gone."""

    def __init__(self, run_id: int, renew: Callable[[], None]) -> None:
        self._run_id, self._renew = run_id, renew
        self._end = threading.Event()
        self.cancelled = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"pulse-{run_id}", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        beats = 0.0
        try:
            while not self._end.is_set():
                try:
                    asked = Run.objects.filter(pk=self._run_id).values_list("cancel_requested", flat=True).first()
                    if asked is None or asked:
                        self.cancelled.set()
                    if beats <= 0:
                        Run.objects.filter(pk=self._run_id).update(heartbeat_at=timezone.now())
                        self._renew()
                        beats = BEAT_SECONDS
                except DatabaseError:
                    # A busy database is asked again; one that is gone for good ends the run where results are saved.
                    log.warning("pulse missed a beat run=%s", self._run_id, exc_info=True)
                    connection.close()
                beats -= CANCEL_SECONDS
                self._end.wait(CANCEL_SECONDS)
        finally:
            connection.close()
