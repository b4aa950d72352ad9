"""What is answered while the web server starts: 503 and when to ask again, and never an empty connection."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = "rollout-inspector-starting"
"""The header `Server` of these answers, which tells them from those of the web server."""
RETRY_SECONDS = 5
SENTENCE = f"Rollout Inspector is starting. Try again in {RETRY_SECONDS} seconds."
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>Rollout Inspector is starting</title>{refresh}
</head>
<body><h1>Rollout Inspector is starting</h1><p>{sentence}</p></body>
</html>
"""


class _Answer(BaseHTTPRequestHandler):
    timeout = 5.0

    def answer(self) -> None:
        """One answer for every address: a problem document, JSON or a page, as the web server would give it."""
        path = self.path.partition("?")[0]
        if path.startswith("/api/") or path.endswith(".json") or path == "/health":
            kind = "application/problem+json" if path.startswith("/api/v1/") else "application/json"
            body = json.dumps({"title": "Service Unavailable", "status": 503, "detail": SENTENCE, "error": SENTENCE})
        else:
            kind = "text/html; charset=utf-8"
            # A form that was sent is not sent again by itself.
            is_read = self.command == "GET"
            refresh = f'<meta http-equiv="refresh" content="{RETRY_SECONDS}">' if is_read else ""
            sentence = "This page asks again by itself." if is_read else f"Nothing was kept. {SENTENCE}"
            body = PAGE.format(refresh=refresh, sentence=sentence)
        self.send_response(503)
        self.send_header("Retry-After", str(RETRY_SECONDS))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode("ascii"))
        # Bytes that nobody has read would reset the connection, and the client would lose the answer.
        self.connection.shutdown(socket.SHUT_WR)
        while self.rfile.read1(65536):
            pass

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = answer

    def version_string(self) -> str:
        return SERVER

    def log_message(self, *_: object) -> None:
        """Nothing: an address may hold a token."""


class _Server(ThreadingHTTPServer):
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Nothing: the client has gone."""


class StartingPage:
    """Answers on a listening socket from :meth:`open` to :meth:`close`; the socket stays open."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._server: _Server | None = None

    def open(self) -> None:
        if self._server is None:
            self._server = _Server(("", 0), _Answer, bind_and_activate=False)
            self._server.socket.close()
            self._server.socket = self._listener.dup()
            self._server.socket.setblocking(False)  # a client that has gone leaves nothing to accept
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
