"""Prefetching leases: a thread leases trajectories before the loop needs them, so it never waits for the database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from django.db import connection

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

    def __enter__(self) -> LeasePrefetcher:
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
