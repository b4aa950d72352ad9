"""Connections to clients, which measure how long a client keeps a thread waiting."""

import contextlib
import errno
import select
import socket
import time
from typing import Any

STALL_SECONDS = 15.0
"""How long a client may keep a thread waiting. Bytes that come or go take back the time that they need at
:data:`LEAST_RATE`."""
SCARCE_SECONDS = 0.1  # The same while half of the threads wait for clients, and requests wait for a thread.
LEAST_RATE = 10_000  # Bytes a second.
SEND_BUFFER_BYTES = 256 << 10
"""What the kernel holds of an answer. Left to itself it holds megabytes for a client that does not read."""


class ClientCutOff(ConnectionResetError):
    """The client was too slow. To gunicorn and Django it is a client that has gone."""

    def __init__(self) -> None:
        super().__init__(errno.ECONNRESET, "the client was too slow")


class Waits:
    """The connections for which threads of this process wait."""

    def __init__(self) -> None:
        self.clients: set[ClientSocket] = set()

    def cut_off_slow(self) -> None:
        """End each connection that keeps a thread waiting for longer than is fair."""
        for client in list(self.clients):
            if client.behind() > SCARCE_SECONDS:
                client.cut_off()


class ClientSocket(socket.socket):
    """A connection to a client. In blocking mode a call waits as long as the client is not too slow."""

    def __init__(self, waits: Waits, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._waits = waits
        self._since: float | None = None
        self._is_cut = False
        self.begin()

    def begin(self) -> None:
        """A request begins: what was waited for the one before is forgotten."""
        self._behind = 0.0

    def behind(self) -> float:
        """Seconds that were waited for this client, less those that its bytes have taken back."""
        since = self._since
        return self._behind + (time.monotonic() - since if since is not None else 0.0)

    def cut_off(self) -> None:
        """End the connection, so that the thread that waits for it goes on."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As of a socket. Raises :class:`ClientCutOff`."""
        while self.gettimeout() is None:
            try:
                data = super().recv(size, flags | socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLIN)
            else:
                self._moved(len(data))
                return data
        return super().recv(size, flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        """As of a socket. Raises :class:`ClientCutOff`."""
        view = memoryview(data)
        while view:
            try:
                sent = self.send(view, flags | socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLOUT)
            else:
                self._moved(sent)
                view = view[sent:]

    def _moved(self, n_bytes: int) -> None:
        self._behind = max(self._behind - n_bytes / LEAST_RATE, 0.0)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self, event)
        patience = STALL_SECONDS - self._behind
        self._since = time.monotonic()
        self._waits.clients.add(self)
        try:
            is_ready = patience > 0 and bool(poll.poll(patience * 1000))
        finally:
            self._waits.clients.discard(self)
            self._behind += time.monotonic() - self._since
            self._since = None
        if not is_ready or self._is_cut:
            raise ClientCutOff
