"""Waiting for environments in threads, so that a slow one does not delay others."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from rollouts.sampling.environments.protocol import Outcome


class Answers:
    """Threads that wait for environments. A thread that hangs is given up."""

    def __init__(self, n: int = 4) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Outcome], Callable[[Outcome | Exception], None]] | None] = (
            SimpleQueue()
        )
        self._n = 0
        for _ in range(n):
            self.spawn()

    def ask(self, call: Callable[[], Outcome], answered: Callable[[Outcome | Exception], None]) -> None:
        self._calls.put((call, answered))

    def close(self) -> None:
        for _ in range(self._n):
            self._calls.put(None)

    def spawn(self) -> None:
        """Start a thread, also in place of one whose call hangs."""
        self._n += 1
        Thread(target=self._serve, name="environment", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            outcome: Outcome | Exception
            try:
                outcome = call[0]()
            except Exception as error:
                outcome = error
            call[1](outcome)
