"""Write-behind: a thread writes what the loop produces, so that neither loop nor engine waits for the database."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from django.db import connection

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.trajectory import Step
from rollouts.sampling.loop import RolloutJob

log = logging.getLogger(__name__)

Saved = tuple[RolloutJob, int, Step]

GATHER_SECONDS = 0.2
"""Shortest time between two writes, except before the last: few large writes cost less than many small ones."""


class WriteBehind:
    """Takes steps and ends in order, and hands what has gathered meanwhile to ``write``, in one thread. After ``write``
    has raised, ``error`` holds the exception, and everything that follows is dropped."""

    def __init__(self, write: Callable[[Sequence[Saved], Sequence[TrajectoryEnd]], None]) -> None:
        self._write = write
        self._queue: SimpleQueue[tuple[Sequence[Saved], Sequence[TrajectoryEnd]] | None] = SimpleQueue()
        self._closing = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def steps(self, steps: Sequence[Saved]) -> None:
        self._queue.put((steps, ()))

    def done(self, finished: Sequence[TrajectoryEnd]) -> None:
        self._queue.put(((), finished))

    def close(self) -> None:
        """Write everything that was taken, then end."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            ending, next_write = False, 0.0
            while not ending:
                self._closing.wait(max(0.0, next_write - time.monotonic()))
                batch = [self._queue.get()]
                next_write = time.monotonic() + GATHER_SECONDS
                while not self._queue.empty():
                    batch.append(self._queue.get())
                ending = None in batch
                steps = [item for part in batch if part for item in part[0]]
                finished = [item for part in batch if part for item in part[1]]
                if self.error is None and (steps or finished):
                    try:
                        self._write(steps, finished)
                    except Exception as error:
                        log.exception("batch not saved")
                        self.error = error
        finally:
            # The connection belongs to this thread and would stay open with it.
            connection.close()
