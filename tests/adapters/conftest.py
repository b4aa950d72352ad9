"""A server that takes pushes, in memory and without a database."""

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rollout_inspector.client.adapters.stream import RolloutStream
from tests.conftest import wait_until


class FakeServer:
    """Answers as the push API does. ``status`` other than 200 refuses; ``silent`` breaks connections off."""

    def __init__(self) -> None:
        self.status, self.silent = 200, False
        self.runs: list[dict[str, Any]] = []
        self.pushes: list[tuple[str, dict[str, str], list[Any]]] = []
        """Run, query and records of each push that was taken."""
        self.asked = 0
        self.gate = threading.Event()
        self.gate.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked += 1
                outer.gate.wait(240)
                if outer.silent:
                    self.close_connection = True
                    return
                status, answer = outer.take(self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def take(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.status != 200:
            return self.status, {"error": f"Refused with {self.status}."}
        at = urlsplit(path)
        if at.path == "/api/runs":
            self.runs.append(json.loads(body))
            return 201, {"run": f"run{len(self.runs)}"}
        lines = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        records = [json.loads(line) for line in lines.splitlines()]
        self.pushes.append((at.path.split("/")[3], {k: v[0] for k, v in parse_qs(at.query).items()}, records))
        return 200, {"run": at.path.split("/")[3], "trajectories": len(records), "known": 0, "rejected": []}

    @property
    def records(self) -> list[Any]:
        """All records that were taken, in the order in which they came."""
        return [record for _, _, records in self.pushes for record in records]

    def close(self) -> None:
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    for name in ("URL", "TOKEN", "RUN", "FOLDER", "TOKENIZER"):
        monkeypatch.delenv(f"ROLLOUT_INSPECTOR_{name}", raising=False)
    for wait in (RolloutStream.flush, RolloutStream.settle, RolloutStream.close):
        monkeypatch.setattr(wait, "__defaults__", (240.0,))  # a trainer gives up earlier than a busy machine needs
    found = FakeServer()
    yield found
    found.close()


def end(stream: RolloutStream) -> None:
    """Close a stream and wait for its threads: one of them may be in the middle of asking the server."""
    stream.close()
    for thread in stream._threads:
        thread.join(240)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does."""
    wait_until(condition, 240, "another thread has done it")
