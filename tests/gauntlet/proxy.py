"""The reference proxy: a small gateway that captures calls and rows, and can be given one fault.

It asks the engine for ids, hides them from clients that did not, and writes `calls.jsonl` and `rows.jsonl`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rollout_inspector.formats import FORMATS, Source
from rollout_inspector.gauntlet.captured import read_captured
from rollout_inspector.gauntlet.engine import GauntletEngine
from rollout_inspector.gauntlet.harness import GauntletHarness, joined
from rollout_inspector.gauntlet.play import play
from rollout_inspector.gauntlet.properties import Verdict, decide
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Trajectory

Fields = dict[str, Any]
_decode = msgspec.json.Decoder(float_hook=lambda text: msgspec.Raw(text.encode())).decode
_encode = msgspec.json.Encoder().encode


def _same(_: Proxy, value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Fault:
    """What a proxy does wrong, as changes of what passes through it. Each is given the proxy and a value."""

    name: str = "none"
    breaks: str = ""
    """The property that it breaks."""
    request: Callable[[Proxy, Fields], Fields] = _same
    """What is sent to the engine."""
    status: Callable[[Proxy, int], int] = _same
    """The status that the client gets."""
    answer: Callable[[Proxy, Fields], Fields] = _same
    """A whole answer for the client, ids hidden."""
    raw_answer: Callable[[Proxy, bytes], bytes] = _same
    """Its bytes."""
    event: Callable[[Proxy, Fields], Fields | None] = _same
    """An event for the client, ids hidden; None = it is left out."""
    kept: Callable[[Proxy, Fields], Fields | None] = _same
    """An event of the engine before it is captured; None = it is not."""
    line: Callable[[Proxy, Fields], list[Fields]] = lambda _, line: [line]
    """A captured call, as the lines that are written."""
    lines: Callable[[Proxy, list[Fields]], list[Fields]] = _same
    """All lines, when the proxy ends."""
    file: Callable[[Proxy, bytes], bytes] = _same
    """The bytes of the file."""
    row: Callable[[Proxy, Fields], Fields] = _same
    """A training row."""
    habits: frozenset[str] = frozenset()
    """Other ways: `holds streams back`, `reads on`, `ends cut streams`, `captures errors`, `caches`, `asks twice`,
    `leaks ids`; and what is no fault: `refuses choices`, `writes rows alone`, `writes at once`."""


@dataclass
class Proxy:
    """A proxy in threads of this process."""

    engine: str
    folder: Path
    fault: Fault = field(default_factory=Fault)
    memory: Fields = field(default_factory=dict)
    """What a fault remembers."""
    port: int = 0

    def __post_init__(self) -> None:
        self.captured: list[Fields] = []
        self.n_calls: Counter[str] = Counter()
        self._lock = Lock()
        self._answers: dict[bytes, bytes] = {}
        proxy = self

        class Handler(_Handler):
            owner = proxy

        class Server(ThreadingHTTPServer):
            daemon_threads = False
            request_queue_size = 128

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def capture(self, line: Fields) -> None:
        with self._lock:
            self.captured += self.fault.line(self, line)
            if "writes at once" in self.fault.habits:
                with (self.folder / "calls.jsonl").open("ab") as file:
                    file.write(_encode(line) + b"\n")

    def close(self) -> None:
        """Wait for what is under way, and write the files."""
        self._server.shutdown()
        self._server.server_close()
        if "writes at once" in self.fault.habits:
            return
        lines = self.fault.lines(self, self.captured)
        data = self.fault.file(self, b"".join(_encode(line) + b"\n" for line in lines))
        if "writes rows alone" not in self.fault.habits:
            (self.folder / "calls.jsonl").write_bytes(data)
        rows = []
        for trajectory in FORMATS["recorded_calls"].read(Source.of_bytes(data)):
            if isinstance(trajectory, Trajectory):
                rows += [self.fault.row(self, _row_line(row)) for row in merged_rows(trajectory.steps) if len(row.ids)]
        (self.folder / "rows.jsonl").write_bytes(b"".join(_encode(row) + b"\n" for row in rows))


def _row_line(row: Any) -> Fields:
    """A row as verl writes it."""
    logprobs = np.zeros(len(row.ids)) if row.logprobs is None else np.nan_to_num(row.logprobs)
    return {
        "prompt_ids": row.ids[:1].tolist(), "response_ids": row.ids[1:].tolist(),
        "response_mask": row.loss_mask[1:].astype(int).tolist(), "response_logprobs": logprobs[1:].tolist(),
    }


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        proxy, fault = self.owner, self.owner.fault
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "refuses choices" in fault.habits and json.loads(body).get("n", 1) > 1:
            self._send(400, b'{"error": {"message": "one choice at a time"}}')
            return
        if "refuses everything" in fault.habits and b"check.0" not in body:
            self._send(400, b'{"error": {"message": "not today"}}')
            return
        if "caches" in fault.habits and body in proxy._answers:
            self._send(200, proxy._answers[body])
            return
        asked = json.loads(body)
        session, parent = self.headers["X-Session-Id"], self.headers.get("X-Parent-Session-Id")
        line: Fields = {"session_id": parent or session, "request": asked}
        if parent:
            line["agent"] = session
        sent = fault.request(proxy, {**asked, "return_token_ids": True, "logprobs": asked.get("logprobs") or True})
        address = urlsplit(proxy.engine)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        for _ in range(2 if "asks twice" in fault.habits else 1):
            connection.close()
            connection.request("POST", self.path, _encode(sent), {"Content-Type": "application/json"})
            upstream = connection.getresponse()
            if asked.get("stream") and upstream.status == 200:
                break
            data = upstream.read()
        try:
            if upstream.status != 200:
                if "captures errors" in fault.habits:
                    proxy.capture({**line, "response": {"choices": [{"index": 0, "message": {}}]}})
                self._send(fault.status(proxy, upstream.status), data)
            elif asked.get("stream"):
                self._stream(upstream, asked, line)
            else:
                answer = _decode(data)
                proxy.capture({**line, "response": deepcopy(answer)})
                shown = _encode(fault.answer(proxy, hidden(answer, asked, fault)))
                shown = proxy._answers[body] = fault.raw_answer(proxy, shown)
                self._send(200, shown)
        except OSError:
            self.close_connection = True
        finally:
            upstream.close()
            connection.close()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, upstream: http.client.HTTPResponse, asked: Fields, line: Fields) -> None:
        proxy, fault = self.owner, self.owner.fault
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        events: list[Fields] = []
        waiting: list[bytes] = []
        is_whole = False
        is_left = False

        def write(data: bytes) -> None:
            nonlocal is_left
            if "holds streams back" in fault.habits:
                waiting.append(data)
                return
            try:
                if not is_left:
                    self.wfile.write(data)
            except OSError:
                is_left = True
                if "reads on" not in fault.habits:
                    raise

        try:
            while text := upstream.readline():
                if not text.startswith(b"data:"):
                    continue
                if text.strip() == b"data: [DONE]":
                    is_whole = True
                    break
                event = _decode(text[5:])
                kept = fault.kept(proxy, deepcopy(event))
                if kept is not None:
                    events.append(kept)
                shown = fault.event(proxy, hidden(event, asked, fault))
                if shown is not None and not _is_empty(shown):
                    write(b"data: " + _encode(shown) + b"\n\n")
        except (OSError, http.client.HTTPException):
            pass
        if is_whole or "ends cut streams" in fault.habits:
            write(b"data: [DONE]\n\n")
        response = joined(events)
        for choice in response["choices"]:
            choice["index"] = int(choice["index"])
            if not is_whole and not choice.get("finish_reason"):
                choice["finish_reason"] = "abort"
        if response["choices"]:
            proxy.capture({**line, "response": response})
        if waiting:
            self.wfile.write(b"".join(waiting))


def hidden(answer: Fields, asked: Fields, fault: Fault) -> Fields:
    """An answer or an event without what only the proxy asked for."""
    names = [] if asked.get("return_token_ids") or "leaks ids" in fault.habits else ["token_ids", "prompt_token_ids"]
    if asked.get("logprobs") in (None, False):
        names.append("logprobs")
    for holder in (answer, *answer.get("choices", ())):
        for name in names:
            holder.pop(name, None)
    return answer


def _is_empty(event: Fields) -> bool:
    choices = event.get("choices") or []
    return bool(choices) and all(
        choice.get("delta") == {} and not choice.get("finish_reason") and not choice.get("logprobs")
        and not choice.get("token_ids") for choice in choices
    )


def verdicts(folder: Path, fault: Fault) -> dict[str, Verdict]:
    """What the gauntlet says of the proxy with a fault."""
    with contextlib.closing(GauntletEngine(patience=2.0)) as engine:
        proxy = Proxy(engine.url, folder, fault)
        harness = GauntletHarness(proxy.url, engine)
        try:
            play(harness)
        finally:
            proxy.close()
        return {verdict.name: verdict for verdict in decide(read_captured(folder, harness))}


def main() -> None:
    """The proxy as a process: `python -m tests.gauntlet.proxy ENGINE PORT FOLDER`; SIGTERM ends it."""
    engine, port, folder = sys.argv[1:]
    stop = Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    proxy = Proxy(engine, Path(folder), port=int(port))
    stop.wait()
    proxy.close()


if __name__ == "__main__":
    main()
