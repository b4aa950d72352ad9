"""The logs of a running server hold no token, whatever the web server itself writes about a broken request."""

import os
import re
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.samples.credentials import API, LOGIN, RECORDER, SESSION, SHARE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ends the server with its parent")
LINK = re.compile(r"is ready: (http://127\.0\.0\.1:(\d+))/login\?token=(\S+)")
HEADERS = (
    f"Host: 127.0.0.1\r\nAuthorization: Bearer {API}\r\nCookie: inspector_session={SESSION}; csrftoken={SESSION}\r\n"
    f"X-Recorder-Token: {RECORDER}\r\n"
)
BROKEN = [
    f"GET /s/{SHARE} HTTP/1.1\r\n{HEADERS}\r\n",
    f"GET /s/{SHARE} HTTP/9.9\r\n{HEADERS}\r\n",
    f"GET\x01 /s/{SHARE} HTTP/1.1\r\n{HEADERS}\r\n",
    f"GET  /s/{SHARE}  HTTP/1.1\r\n{HEADERS}\r\n",
    f"GET /s/{SHARE}{'x' * 9000} HTTP/1.1\r\n{HEADERS}\r\n",
    f"GET /login?token={LOGIN} HTTP/1.1\r\n{HEADERS}Cookie inspector_session={SESSION}\r\n\r\n",
    f"GET /login?token={LOGIN} HTTP/1.1\r\n{HEADERS}Cookie: {'x' * 70000}\r\n\r\n",
    f"GET /runs HTTP/1.1\r\n{HEADERS.replace('127.0.0.1', 'evil.example')}\r\n",
    f"POST /api/runs HTTP/1.1\r\n{HEADERS}Content-Length: -1\r\n\r\n",
    f"POST /api/runs HTTP/1.1\r\n{HEADERS}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    f"POST /tokens HTTP/1.1\r\n{HEADERS}Content-Length: 9000\r\n\r\nab",
    f"POST /login HTTP/1.1\r\n{HEADERS}Content-Length: 60\r\n\r\ncsrfmiddlewaretoken={SESSION}&password={LOGIN}",
]


def test_no_log_of_a_server_holds_a_token(tmp_path: Path) -> None:
    data = tmp_path / "data"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    environment = {
        **kept,
        "INSPECTOR_DATA": str(data),
        "HF_HUB_OFFLINE": "1",
        "INSPECTOR_LOG_LEVEL": "DEBUG",
        "DEBUG": "1",
    }
    command = [sys.executable, "manage.py", "serve", "--port", "18700", "--no-workers"]
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        ready = next(found for line in server.stdout if (found := LINK.search(line)))
        for request in BROKEN:
            with socket.create_connection(("127.0.0.1", int(ready[2])), timeout=240) as connection, suppress(OSError):
                connection.sendall(request.encode("latin-1"))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        with urllib.request.urlopen(f"{ready[1]}/login?token={ready[3]}", timeout=240) as answer:
            assert answer.status == 200
    finally:
        server.terminate()
        server.wait(60)
    logs = {path.name: path.read_text(errors="replace") for path in (data / "logs").iterdir()}
    assert "path=/s/..." in logs["web.log"] and re.search(r"event=login .*by link", logs["web.log"])
    for name, text in logs.items():
        assert not [one for one in (SHARE, API, LOGIN, SESSION, RECORDER, ready[3]) if one in text], (
            name,
            text[-3000:],
        )
