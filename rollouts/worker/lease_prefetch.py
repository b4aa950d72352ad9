"""Threads between the loop and the database, so that neither loop nor engine waits for it. One leases trajectories
before the loop needs them; the other writes what the loop produces."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Self

from django.db import connection

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.trajectory import Step
from rollouts.sampling.loop import RolloutJob


class LeasePrefetcher:
    """Keeps up to ``n`` jobs ready. ``lease`` returns up to so many further jobs; none = no job is left."""

    def __init__(self, lease: Callable[[int], Sequence[RolloutJob]], n: int) -> None:
        self._lease, self._n = lease, max(1, n)
        self._change = threading.Condition()
        self._ready: list[RolloutJob] = []
        self._exhausted = self._ended = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="leasing", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._thread.join()

    def more(self, n: int, wait: bool) -> Sequence[RolloutJob] | None:
        """Returns up to ``n`` jobs that are ready; None = no job is left. Raises what ``lease`` raised. ``wait``: wait
        until a job is ready."""
        with self._change:
            if wait:
                self._change.wait_for(lambda: self._ready or self._exhausted or self._error)
            if self._error is not None and not self._ready:
                raise self._error
            if self._exhausted and not self._ready:
                return None
            jobs, self._ready = self._ready[:n], self._ready[n:]
            self._change.notify_all()
        return jobs

    def _run(self) -> None:
        try:
            while True:
                with self._change:
                    # By halves: with a query for each free place there would be a query for each trajectory.
                    self._change.wait_for(lambda: self._ended or len(self._ready) <= self._n // 2)
                    if self._ended:
                        return
                    n_free = self._n - len(self._ready)
                jobs = self._lease(n_free)
                with self._change:
                    self._ready.extend(jobs)
                    self._exhausted = not jobs
                    self._change.notify_all()
                    if self._exhausted:
                        return
        except Exception as error:
            with self._change:
                self._error = error
                self._change.notify_all()
        finally:
            connection.close()


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
