"""What a server answers before it can answer."""

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from inspector.server.starting_page import SENTENCE, SERVER, StartingPage
from tests.conftest import ROOT, database_url, wait_until
from tests.ports import HeldPort


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def ask(port: int, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[Any, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/runs.json", "/api/runs", "/api/v1/runs?limit=1", "/health", "/s/<script>"])
def test_every_address_says_that_it_starts(listener: socket.socket, path: str, method: str) -> None:
    page = StartingPage(listener)
    page.open()
    try:
        body = b"x" * 300_000 if method in ("POST", "PUT", "PATCH") else b""
        answer, text = ask(listener.getsockname()[1], path, method, body)
    finally:
        page.close()
    assert (answer.status, answer.headers["Retry-After"], answer.headers["Server"]) == (503, "5", SERVER)
    assert int(answer.headers["Content-Length"]) > 0 and "script" not in text
    if method == "HEAD":
        assert text == ""
    elif "api/v1" in path:
        assert json.loads(text)["detail"] == SENTENCE and answer.headers["Content-Type"] == "application/problem+json"
    elif path == "/" or "script" in path:
        assert "is starting" in text and ('http-equiv="refresh"' in text) == (method == "GET")
        assert (SENTENCE in text) == (method != "GET")
    else:
        assert json.loads(text)["error"] == SENTENCE


def test_a_client_that_sends_nothing_keeps_nobody_waiting(listener: socket.socket) -> None:
    page = StartingPage(listener)
    page.open()
    page.open()
    try:
        silent = [socket.create_connection(listener.getsockname()) for _ in range(20)]
        assert ask(listener.getsockname()[1], "/")[0].status == 503
    finally:
        page.close()
        page.close()
    for client in silent:
        client.close()
    # The socket still listens: what connects now waits for the web server.
    with socket.create_connection(listener.getsockname(), timeout=60) as waiting:
        listener.settimeout(60)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getpeername() == waiting.getsockname()


SLOW = """
import time
from contextlib import nullcontext
from pathlib import Path

import django

def application(environ, start_response):
    start_response("200 OK", [("Content-Length", "2")])
    return [environ["SCRIPT_NAME"].encode() or b"ok"]

while not Path(__file__).with_name("go").exists():
    time.sleep(0.05)
django.setup()
"""


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("opened_by", ["another process", "gunicorn"])
def test_gunicorn_answers_while_it_loads_and_is_not_moved_by_a_header(
    opened_by: str, tmp_path: Path, settings: Any, port: HeldPort
) -> None:
    """A11: a header SCRIPT_NAME was answered by 500."""
    (tmp_path / "slow_application.py").write_text(SLOW)
    address = ("127.0.0.1", port.number)
    with nullcontext() if opened_by == "gunicorn" else socket.create_server(address) as listener:
        bind = f"127.0.0.1:{port.number}" if listener is None else f"fd://{listener.fileno()}"
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-c", "python:inspector.server.gunicorn_conf", "slow_application"],
            cwd=ROOT, pass_fds=[] if listener is None else [listener.fileno()],
            env={
                **os.environ, "BIND": bind, "PYTHONPATH": f"{ROOT}:{tmp_path}",
                "INSPECTOR_DATA": str(tmp_path / "data"),
                "DJANGO_SETTINGS_MODULE": "inspector.settings", "DATABASE_URL": database_url(),
                "REDIS_URL": "redis://127.0.0.1:1/0",
            },
        )
        answers: list[int] = []

        def asked() -> int:
            try:
                answers.append(ask(port.number, "/")[0].status)
            except OSError:  # nobody listens yet
                return 0
            return answers[-1]

        try:
            wait_until(lambda: asked() == 503, 60, "it says that it starts")
            (tmp_path / "go").touch()
            wait_until(lambda: asked() == 200, 60, "it has started")
            assert set(answers) == {503, 200} and answers == sorted(answers, reverse=True)
            for name in ("SCRIPT_NAME", "Script_Name", "Script-Name", "PATH_INFO"):
                answer, text = ask(port.number, "/", **{name: "/elsewhere"})
                assert (answer.status, text) == (200, "ok"), name
        finally:
            server.terminate()
            server.wait(60)
