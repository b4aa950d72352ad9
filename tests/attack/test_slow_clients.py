"""M3: clients that keep the web server waiting. The server is the real one, with its own gunicorn configuration."""

import http.client
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from inspector.server.web_worker import awaits_body
from rollouts.jobs.exports import exports
from rollouts.store import files
from rollouts.store.models import Job, Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from tests.attack import slow_clients
from tests.conftest import ROOT, database_url, wait_until
from tests.samples.formats import GYM, changed, jsonl

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.sqlite_only]

BIG = 30_000_000
ESTABLISHED = "01"
"""The state of a connection in /proc/net/tcp that neither side has ended."""
SHORT = """
from inspector.server import web_worker
from inspector.server.gunicorn_conf import *
web_worker.HEAD_SECONDS = web_worker.STALL_SECONDS = 1.0
"""
"""A configuration with which a test does not wait long until a client is cut off."""
CLOCK = """
import time
from pathlib import Path
from types import SimpleNamespace
from inspector.server import web_worker
from inspector.server.gunicorn_conf import *
web_worker.HEAD_SECONDS = web_worker.STALL_SECONDS = 600.0
web_worker.LEAST_RATE = 1
def monotonic():
    return time.monotonic() + float(Path({clock!r}).read_text())
web_worker.time = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
"""
"""The test puts the clock of the server forward, which allows each client ten minutes."""


@dataclass(frozen=True)
class Server:
    """A running web server on the database of the test, with a run whose export is large."""

    host: str
    port: int
    cookie: str
    token: str
    run: str
    big: str
    log: Path

    def get(self, path: str = "/login") -> int:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=240)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def connect(self, begin: bytes) -> socket.socket:
        client = socket.create_connection((self.host, self.port), timeout=240)
        client.sendall(begin)
        return client

    def push_head(self, n_bytes: int) -> bytes:
        line = f"POST /api/runs/{self.run}/trajectories"
        told = (f"Authorization: Bearer {self.token}", "Content-Type: application/x-ndjson", "Connection: close")
        return slow_clients.request(self, line, *told, f"Content-Length: {n_bytes}")


Start = Callable[..., Server]


@pytest.fixture
def start(settings: Any, tmp_path: Path) -> Iterator[Start]:
    """`start(configuration)`: a web server with a gunicorn configuration of its own, or with the product's."""
    processes: list[subprocess.Popen[bytes]] = []

    def go(configuration: str = "from inspector.server.gunicorn_conf import *") -> Server:
        from tests.people import make_member

        user = make_member("ada", password="a long password")
        run = create_run(Run.Kind.IMPORT, "run", user=user, status=Run.Status.DONE)
        job = Job.objects.create(
            run=run, kind="export", status="done", options={"format": "own_jsonl"}, created_by=user,
            expires_at=timezone.now() + timedelta(days=1),
        )
        files.put(exports.key_of(job), io.BytesIO(bytes(BIG)))
        member = Client()
        member.force_login(user)
        _, token = create_api_key(user, "push")
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        port = listener.getsockname()[1]
        conf, log = tmp_path / "conf.py", tmp_path / "web.log"
        conf.write_text(configuration)
        environment = {
            **os.environ, "DJANGO_SETTINGS_MODULE": "inspector.settings", "DATABASE_URL": database_url(), "DEBUG": "1",
            "REDIS_URL": "redis://127.0.0.1:1/0", "INSPECTOR_DATA": str(settings.INSPECTOR_DATA),
        }
        command = [sys.executable, "-m", "gunicorn", "-c", str(conf), "inspector.wsgi:application",
                   "--bind", f"fd://{listener.fileno()}"]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                 pass_fds=[listener.fileno()], start_new_session=True)
            )
        listener.close()
        cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in member.cookies.items())
        server = Server("127.0.0.1", port, cookie, token, run.code, f"/runs/{run.code}/jobs/{job.code}/file", log)
        wait_until(lambda: _answers(server), 240, "the web server answers")
        return server

    yield go
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def _answers(server: Server) -> bool:
    try:
        return server.get() == 200
    except OSError:
        return False


def _is_stored(server: Server, body: bytes) -> bool:
    """Whether the server takes a push whose body comes in two pieces. It may say that it is busy."""
    client = server.connect(server.push_head(len(body)) + body[:100])
    client.sendall(body[100:])
    status = rest(client)[9:12]
    assert status in (b"200", b"503")
    return status == b"200"


def rest(client: socket.socket) -> bytes:
    """What still comes until the server ends the connection."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


class Stop(threading.Event):
    """What ends an attack. It says when the attack holds all of its connections and rests for a second."""

    def __init__(self) -> None:
        super().__init__()
        self.all_are_held = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout:
            self.all_are_held.set()
        return super().wait(timeout)


def test_other_requests_are_answered_while_200_clients_are_slow(start: Start) -> None:
    """M3: each kind of slow client holds 200 connections; pages still come. Pushes come through too."""
    server = start()
    for name, attack in slow_clients.ATTACKS.items():
        stop = Stop()
        attacker = threading.Thread(target=attack, args=(server, stop))
        attacker.start()
        try:
            assert stop.all_are_held.wait(240), name
            for _ in range(3):
                assert server.get() == 200, name  # the clients hold on until they are stopped
        finally:
            stop.set()
            attacker.join()
    held = [server.connect(server.push_head(slow_clients.BODY) + b"{") for _ in range(slow_clients.CLIENTS)]
    body = jsonl(changed(GYM, "_ng_task_index", to=1))
    wait_until(lambda: _is_stored(server, body), 240, "a push comes through")
    for one in held:
        one.close()
    assert " status=500" not in server.log.read_text() and "Traceback" not in server.log.read_text()


FEW = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from inspector.server.gunicorn_conf import *
from inspector.server import web_worker
web_worker.HEAD_SECONDS = 3.0
workers = 1
"""


def test_a_web_process_without_descriptors_lives_on(start: Start) -> None:
    """It has fewer descriptors than connections come: the others wait, and no request that is under way is lost."""
    server = start(FEW)
    held = [server.connect(b"") for _ in range(200)]
    assert server.get() == 200  # when the silent ones are cut off
    for client in held:
        client.close()
    log = server.log.read_text()
    assert "Booting worker" not in log and "exited" not in log and "Exception in worker" not in log, log[-3000:]


def test_a_client_that_does_not_go_on_is_cut_off(start: Start) -> None:
    """M3: in the head, drop by drop too, in the body and while it should read."""
    server = start(SHORT)
    head = slow_clients.request(server, "GET /login")
    reading = server.connect(slow_clients.request(server, f"GET {server.big}", f"Cookie: {server.cookie}"))
    stalled = [server.connect(b""), server.connect(head[:-2]), server.connect(server.push_head(1_000_000) + b"{")]
    dripping = server.connect(head[:-2] + b"X-a: ")
    wait_until(lambda: _is_cut_off(dripping), 240, "the client that drips is cut off")
    for client in stalled:
        assert b"HTTP/1.1 200" not in rest(client)
    wait_until(lambda: reading.getsockname()[1] not in connections(server), 240, "the client that reads nothing is too")
    assert len(rest(reading)) < BIG
    wait_until(lambda: "trajectories" in server.log.read_text(), 240, "the push has ended")
    assert " status=500" not in server.log.read_text() and "Traceback" not in server.log.read_text()


def _is_cut_off(dripping: socket.socket) -> bool:
    try:
        dripping.send(b"a")
    except OSError:
        return True
    return False


def connections(server: Server) -> dict[int, int]:
    """The port of each client whose connection the server has not ended, and how many bytes the server has to read."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [[int(line[side].partition(":")[2], 16) for side in (1, 2)] for line in lines]
    return {
        client: int(line[4].partition(":")[2], 16)
        for line, (at, client) in zip(lines, ports, strict=True)
        if at == server.port and line[3] == ESTABLISHED
    }


def test_a_client_that_is_slow_but_steady_is_served(start: Start, tmp_path: Path) -> None:
    """A head in pieces, a body in pieces, a large answer, a second request, and bodies that nobody wants: served."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    server = start(CLOCK.format(clock=str(clock)))

    def let_pass(seconds: int) -> None:
        wait_until(lambda: connections(server)[client.getsockname()[1]] == 0, 240, "the server has read all of it")
        draft = tmp_path / "draft"
        draft.write_text(str(int(clock.read_text()) + seconds))
        draft.replace(clock)

    head = slow_clients.request(server, "GET /login", "Connection: close")
    client = server.connect(head[:10])
    for piece in (head[10:40], head[40:]):
        let_pass(200)
        client.sendall(piece)
    assert rest(client).startswith(b"HTTP/1.1 200 ")
    body = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(30)])
    client = server.connect(server.push_head(len(body)))
    for begin in range(0, len(body), len(body) // 6):
        let_pass(300)
        client.sendall(body[begin : begin + len(body) // 6])
    assert rest(client).startswith(b"HTTP/1.1 200 ")
    line = f"GET {server.big}"
    whole = rest(server.connect(slow_clients.request(server, line, f"Cookie: {server.cookie}", "Connection: close")))
    assert whole.startswith(b"HTTP/1.1 200 ") and len(whole) > BIG
    connection = http.client.HTTPConnection(server.host, server.port, timeout=240)
    for _ in range(3):
        connection.request("GET", "/login")
        assert connection.getresponse().read()
    connection.close()
    for n_sent in (100, 200_000):
        unread = slow_clients.request(server, "POST /import", "Content-Length: 200000") + b"x" * n_sent
        assert server.connect(unread).recv(1 << 16).startswith((b"HTTP/1.1 302 ", b"HTTP/1.1 403 "))


@pytest.mark.parametrize(
    ("received", "is_awaited"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", False),
        (b"POST / HTTP/1.1\r\ncontent-length : 4\r\nHost: a\r\n\r\nabc", True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", True),
        (b"GET /?q=Content-Length:%204 HTTP/1.1\r\nHost: a\r\n\r\n", False),
    ],
)
def test_what_counts_as_a_body_that_is_still_to_come(received: bytes, is_awaited: bool) -> None:
    assert awaits_body(received) is is_awaited
