"""The worker class of gunicorn: clients that keep the server waiting hold no threads that others need. Threads of
gunicorn wait for the end of a head, for a body and for a reader without a limit. Its main loop waits two seconds for a
client to close. Decision 0023 says why no other server is used."""

from __future__ import annotations

import contextlib
import errno
import re
import select
import selectors
import socket
import time
from collections import deque
from functools import partial
from typing import Any

from gunicorn.errors import ConfigError
from gunicorn.workers import gthread

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


class ClientSocket(socket.socket):
    """A connection to a client. In blocking mode a call waits as long as the client is not too slow."""

    def __init__(self, waits: set[ClientSocket], fileno: int) -> None:
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
        self._waits.add(self)
        try:
            is_ready = patience > 0 and bool(poll.poll(patience * 1000))
        finally:
            self._waits.discard(self)
            self._behind += time.monotonic() - self._since
            self._since = None
        if not is_ready or self._is_cut:
            raise ClientCutOff


HEAD_SECONDS = 10.0  # How long a client may take for the head of a request, and to close its end after the last answer.
MAX_HEAD_BYTES = 64 << 10
MAX_UNREAD_BYTES = 1 << 20  # How much of a body that nobody wants is read away before the connection is reset.
LINE_SECONDS = 60.0  # How long a request with a body waits for a thread.
TICK_SECONDS = 0.05  # How often slow clients are looked for while requests wait for a thread.
NO_PLACE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a machine or a process that has no descriptor or memory for another connection."""
LENGTH = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r\n", re.I)
CHUNKED = re.compile(rb"\r\ntransfer-encoding[ \t]*:", re.I)
BUSY = b"Too many bodies are being received. Try again in some seconds.\n"
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 10\r\nConnection: close\r\nContent-Type: text/plain\r\n"
REFUSAL += b"Content-Length: %d\r\n\r\n%s" % (len(BUSY), BUSY)


class Connection(gthread.TConn):  # type: ignore[misc]
    """A connection that waits in the main loop until the head of its next request is complete."""

    def __init__(self, worker: WebWorker, client: ClientSocket, address: Any, listener: Any) -> None:
        super().__init__(worker.cfg, client, address, listener)
        self.worker = worker
        self.deadline: float | None = None
        """Until when the head, a thread for the body, or the end of the connection is awaited."""
        self.has_body = False  # Its request takes one of the places for bodies.
        self.unread: int | None = None
        """Bytes that are still read away before the end of the connection. None = it has not come to that."""

    def close(self, graceful: bool = False) -> None:
        if not graceful or not self.worker.await_close(self):
            super().close()


class WebWorker(gthread.ThreadWorker):  # type: ignore[misc]
    """gunicorn's threaded worker. Threads get requests with a complete head, and at most half of them a body."""

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        super().check_config(cfg, log)
        if cfg.is_ssl:
            raise ConfigError("This worker class does not speak HTTPS. Put a proxy that does in front of it.")

    def init_process(self) -> None:
        self.waits: set[ClientSocket] = set()  # The connections for which threads of this process wait.
        self.places = max(self.cfg.threads // 2, 1)
        self.line: deque[Connection] = deque()  # Requests that wait for one of the places for bodies.
        super().init_process()

    def accept(self, listener: Any) -> None:
        try:
            accepted, address = listener.accept()
        except OSError as error:
            if error.errno in NO_PLACE:
                time.sleep(TICK_SECONDS)  # the client waits until another connection ends
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.EWOULDBLOCK):
                raise
            return
        client = ClientSocket(self.waits, accepted.detach())
        self.nr_conns += 1
        self.enqueue_req(Connection(self, client, address, listener.getsockname()))

    # --- before a request: its head, and a place for its body

    def enqueue_req(self, conn: Connection) -> None:
        """Give a thread the request, or wait until it may have one."""
        if conn.deadline is None:
            conn.deadline = time.monotonic() + HEAD_SECONDS
            conn.init()
        received = self._received(conn)
        if received is None or time.monotonic() > conn.deadline:
            self.nr_conns -= 1
            conn.close()
        elif b"\r\n\r\n" not in received and len(received) <= MAX_HEAD_BYTES:
            self._park(conn)
        elif awaits_body(received) and self.places == 0:
            conn.deadline = time.monotonic() + LINE_SECONDS
            self.line.append(conn)
        else:
            self._start(conn, awaits_body(received))

    def _start(self, conn: Connection, has_body: bool) -> None:
        conn.deadline, conn.has_body = None, has_body
        self.places -= has_body
        conn.sock.begin()
        super().enqueue_req(conn)

    def finish_request(self, conn: Connection, fs: Any) -> None:
        self.places += conn.has_body
        conn.has_body = False
        super().finish_request(conn, fs)
        while self.line and self.places:
            self._start(self.line.popleft(), True)

    def _received(self, conn: Connection) -> bytes | None:
        """What the client has sent of the next request; None when it has closed."""
        conn.sock.setblocking(False)
        buffer = conn.parser.unreader.buf
        try:
            data = conn.sock.recv(MAX_HEAD_BYTES)
        except BlockingIOError:
            return bytes(buffer.getvalue())
        except OSError:
            return None
        buffer.seek(0, 2)
        buffer.write(data)
        return bytes(buffer.getvalue()) if data else None

    def _park(self, conn: Connection) -> None:
        """Wait for the client in the main loop, which closes the connection at its deadline."""
        conn.timeout = conn.deadline
        self.pending_conns.append(conn)
        self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def on_pending_socket_readable(self, conn: Connection, client: Any) -> None:
        self.poller.unregister(client)
        self.pending_conns.remove(conn)
        if conn.unread is None:
            self.enqueue_req(conn)
        elif self._is_closed(conn):
            self.nr_conns -= 1
            conn.close()
        else:
            self._park(conn)

    # --- while threads are scarce

    def _is_scarce(self) -> bool:
        return bool(self.line) or self.tpool._work_queue.qsize() > 0

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        super().wait_for_and_dispatch_events(min(timeout, TICK_SECONDS) if self._is_scarce() else timeout)

    def murder_pending(self) -> None:
        """Close what has waited too long, and cut off the clients for which threads wait while requests need them."""
        super().murder_pending()
        if self._is_scarce() and len(self.waits) >= self.cfg.threads // 2:
            for client in list(self.waits):
                if client.behind() > SCARCE_SECONDS:
                    client.cut_off()
        while self.line and time.monotonic() > (self.line[0].deadline or 0):
            conn = self.line.popleft()
            with contextlib.suppress(OSError):
                conn.sock.send(REFUSAL)
            self.nr_conns -= 1
            conn.close(graceful=True)

    # --- after the last request

    def _keepalive_after(self, conn: Connection, keepalive: bool) -> bool:
        """Whether the connection serves another request. A thread does not wait for a body that nobody has read."""
        return keepalive and bool(conn.parser.finish_body(deadline=time.monotonic() + 0.05))

    def await_close(self, conn: Connection) -> bool:
        """Say that the answer ends, and read away what the client still sends: a reset could destroy the answer.
        Returns False when the connection is to be closed now. gunicorn has counted it as closed."""
        conn.unread, conn.deadline = MAX_UNREAD_BYTES, time.monotonic() + HEAD_SECONDS
        try:
            conn.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        conn.sock.setblocking(False)
        if not self.alive or self._is_closed(conn):
            return False
        self.nr_conns += 1
        self._park(conn)
        return True

    def _is_closed(self, conn: Connection) -> bool:
        """Whether the client has closed its end, or has sent too much or for too long."""
        try:
            n = len(conn.sock.recv(MAX_HEAD_BYTES))
        except BlockingIOError:
            return False
        except OSError:
            return True
        conn.unread -= n  # type: ignore[operator]
        return n == 0 or conn.unread < 0 or time.monotonic() > (conn.deadline or 0)  # type: ignore[operator]


def awaits_body(received: bytes) -> bool:
    """Whether a request has a body of which bytes are still to come. ``received``: its head and what came after it."""
    head, _end, body = received.partition(b"\r\n\r\n")
    length = LENGTH.search(head + b"\r\n")
    return bool(CHUNKED.search(head)) or (length is not None and int(length[1]) > len(body))
