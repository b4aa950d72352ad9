"""Clients that keep the web server waiting. Each attack holds :data:`CLIENTS` connections until it is stopped.

For ``python -m benchmarks.measures.gets_under_attack --attack tests.attack.slow_clients:half_heads``, and for
tests.
"""

import socket
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from typing import Any, Protocol

CLIENTS = 200
BODY = 50_000_000
"""Bytes that a client announces and does not send."""


class Target(Protocol):
    """A server as the measurement and the tests know it."""

    host: str
    port: int
    cookie: str
    token: str
    run: str


def request(server: Target, line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", f"Host: {server.host}:{server.port}", *headers, "\r\n"]).encode()


def hold(
    server: Target, begin: bytes, drip: Callable[[socket.socket], object] | None, stop: Event, receive_buffer: int = 0
) -> None:
    """Keep the connections open and send ``begin`` over each; call ``drip`` once a second; connect again when cut."""
    held: list[socket.socket] = []
    while not stop.wait(1.0 if len(held) == CLIENTS else 0.0):
        for client in list(held):
            try:
                if drip is not None:
                    drip(client)
                elif client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                pass
            except OSError:
                held.remove(client)
                client.close()
        while len(held) < CLIENTS and not stop.is_set():
            client = socket.socket()
            if receive_buffer:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            client.settimeout(5)
            try:
                client.connect((server.host, server.port))
                client.sendall(begin)
            except OSError:
                client.close()
                time.sleep(0.05)
                break
            held.append(client)
    for client in held:
        client.close()


def silent(server: Target, stop: Event) -> None:
    """Connections over which nothing is sent."""
    hold(server, b"", None, stop)


def half_heads(server: Target, stop: Event) -> None:
    """Heads without an end."""
    hold(server, request(server, "GET /login")[:-2] + b"X-a: ", None, stop)


def dripped_heads(server: Target, stop: Event) -> None:
    """Heads that grow by a byte in each second."""
    hold(server, request(server, "GET /login")[:-2] + b"X-a: ", lambda client: client.send(b"a"), stop)


def bodies_of_strangers(server: Target, stop: Event) -> None:
    """Bodies that are announced and not sent, without a login."""
    hold(server, request(server, "POST /import", f"Content-Length: {BODY}") + b"half", None, stop)


def pushes(server: Target, stop: Event) -> None:
    """Pushes of a member whose bodies do not come."""
    hold(server, _push(server), None, stop)


def dripped_pushes(server: Target, stop: Event) -> None:
    """Pushes of a member whose bodies come byte by byte."""
    hold(server, _push(server), lambda client: client.send(b"{"), stop)


def _push(server: Target) -> bytes:
    line = f"POST /api/runs/{server.run}/trajectories"
    told = (f"Authorization: Bearer {server.token}", "Content-Type: application/x-ndjson", f"Content-Length: {BODY}")
    return request(server, line, *told) + b"{"


def readers(server: Target, stop: Event) -> None:
    """Readers of a large answer who take a byte in each second: ``server.big``, or an export that is made for each."""
    address = getattr(server, "big", f"/runs/{server.run}/export?format=own_jsonl")
    begin = request(server, f"GET {address}", f"Cookie: {server.cookie}")
    hold(server, begin, lambda client: client.recv(1, socket.MSG_DONTWAIT), stop, receive_buffer=2048)


def unclosed(server: Target, stop: Event) -> None:
    """Clients who ask that the connection is closed, and leave their end open."""
    hold(server, request(server, "GET /login", "Connection: close"), None, stop)


def unread(server: Target, stop: Event) -> None:
    """Clients who are refused, and go on sending what nobody reads."""
    begin = request(server, "POST /import", f"Content-Length: {BODY}")
    hold(server, begin, lambda client: client.send(b"x" * 10_000), stop)


ATTACKS: dict[str, Any] = {
    attack.__name__: attack
    for attack in (
        silent, half_heads, dripped_heads, bodies_of_strangers, pushes, dripped_pushes, readers, unclosed, unread
    )
}
