"""A bucket that fails in the middle of a read or a write: it answers 500, resets, or says nothing more."""

import contextlib
import socket
import struct
import threading
from urllib.parse import quote

FAIL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyBucket:
    """In front of the S3 server. A connection whose answer or request is longer than ``most`` gets the fault."""

    def __init__(self, url: str) -> None:
        self._url, self._target = url, int(url.rpartition(":")[2])
        self.fault, self.way, self.most, self.n_faults = "", "", 0, 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def in_front_of(self, address: str) -> str:
        """The address of a bucket of the server, which leads here."""
        ours = quote(f"http://127.0.0.1:{self.port}", safe="")
        assert quote(self._url, safe="") in address
        return address.replace(quote(self._url, safe=""), ours)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for way, source, sink in (("write", client, server), ("read", server, client)):
                    threading.Thread(target=self._hand_on, args=(way, source, sink, client), daemon=True).start()

    def _hand_on(self, way: str, source: socket.socket, sink: socket.socket, client: socket.socket) -> None:
        n_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                n_bytes += len(data)
                if self.fault and way == self.way and n_bytes > self.most:
                    self.n_faults += 1
                    if self.fault == "stall":
                        return
                    if self.fault == "500":
                        client.sendall(FAIL)
                    else:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                sink.sendall(data)
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def close(self) -> None:
        self._listener.close()
        for one in self._sockets:
            one.close()
