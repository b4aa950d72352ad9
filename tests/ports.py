"""A port of loopback for a server that is told where to listen, and for one that must not be there."""

from __future__ import annotations

import socket


class HeldPort:
    """Nobody is given it by chance while it is held, and it refuses connections until a server listens on it.

    It is bound and does not listen: the kernel leaves it out when somebody asks for any port or connects. Who names it,
    with SO_REUSEADDR as servers do, may listen on it, and again after an end.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.number}"

    def is_served(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.number)) == 0

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others have it."""
        self._socket.close()
