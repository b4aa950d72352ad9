"""The room for calls that are under way or not yet stored: so many, and so many bytes."""

import asyncio

MAX_CALLS = 4096  # Above this number, requests wait for the database.
MAX_BYTES = 1 << 30  # Of requests and answers. One call alone may be larger; answers that have begun go on beyond it.


class Room:
    """Who finds no room waits until calls are stored. For one event loop."""

    def __init__(self) -> None:
        self.n_calls = self.n_bytes = 0
        self._freed = asyncio.Event()

    async def take(self, n_bytes: int) -> None:
        """Wait for the room of a call whose request has so many bytes."""
        while self.n_calls and (self.n_calls >= MAX_CALLS or self.n_bytes + n_bytes > MAX_BYTES):
            self._freed.clear()
            await self._freed.wait()
        self.n_calls += 1
        self.n_bytes += n_bytes

    def grow(self, n_bytes: int) -> None:
        """A call has become so much larger, or smaller."""
        self.n_bytes += n_bytes

    def free(self, n_calls: int, n_bytes: int) -> None:
        """So many calls are stored or let go."""
        self.n_calls -= n_calls
        self.n_bytes -= n_bytes
        self._freed.set()
