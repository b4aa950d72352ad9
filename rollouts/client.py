"""Push trajectories to Rollout Inspector from a trainer. Standard library only: copy this file where you need it.

    from client import push
    push("http://inspector:8000", token, run_code, records)

A record is one line of any format that the server imports: a dict, or a line of JSON as text or bytes. Pushing the same
trajectory again changes nothing, so a retry is safe. A recorded session must be pushed whole, in one call.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import math
import random
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from typing import IO, Any

__all__ = ["Client", "PushError", "push"]

BUSY = (408, 425, 429, 500, 502, 503, 504, 507)
IN_MEMORY_BYTES = 8 << 20


class PushError(Exception):
    """The server did not accept the request; the message says why. ``status``: the HTTP status, None if unanswered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """A client for one server and one token. ``run`` is the code of a run; None lets the first push create one."""

    def __init__(
        self, url: str, token: str, run: str | None = None, *, tries: int = 5, wait: float = 0.5, timeout: float = 300.0
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.run = run
        self.tries, self.wait, self.timeout = max(tries, 1), wait, timeout
        # A redirect could carry the token to another host.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def create_run(self, name: str, tokenizer: str | None = None, chat_template: str | None = None) -> str:
        """Create a run, push to it from now on, return its code. ``tokenizer`` is a name registered on the server."""
        asked = {"name": name, "tokenizer": tokenizer, "chat_template": chat_template}
        body = json.dumps({key: value for key, value in asked.items() if value is not None}).encode()
        self.run = str(self._post("/api/runs", body, {"Content-Type": "application/json"})["run"])
        return self.run

    def push(self, records: Iterable[Any] | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Send records and return ``{"run", "trajectories", "known", "rejected": [{"line", "reason"}], ...}``.

        ``prefix`` is put before each id and group. Use one when the ids start again at each training step.
        """
        if self.run is None:
            self.create_run("pushed " + time.strftime("%Y-%m-%d %H:%M"))
        one = isinstance(records, (Mapping, str, bytes))
        # Written once, compressed, so that a retry sends the same bytes and memory use stays small.
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as body:
            n = _write_lines([records] if one else records, body)
            if n == 0:
                return {"run": self.run, "trajectories": 0, "known": 0, "rejected": []}
            query = f"?{urllib.parse.urlencode({'prefix': prefix})}" if prefix else ""
            path = f"/api/runs/{self.run}/trajectories{query}"
            return self._post(path, body, {"Content-Type": "application/x-ndjson"})

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        failure = PushError(f"{self.url} was not asked.")
        asked = 0.0
        for attempt in range(self.tries):
            if attempt:
                time.sleep(max(min(self.wait * 2 ** (attempt - 1), 30.0), asked) * random.uniform(1.0, 1.5))
            try:
                return self._post_once(path, body, headers)
            except urllib.error.HTTPError as error:
                with error:
                    failure = PushError(_sentence(error), error.code)
                    asked = _seconds(error.headers.get("Retry-After"))
                if error.code not in BUSY:
                    break
            except (OSError, http.client.HTTPException) as error:
                failure = PushError(f"{self.url} does not answer: {getattr(error, 'reason', None) or error!r}.")
        raise failure

    def _post_once(self, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        if isinstance(body, bytes):
            size = len(body)
        else:
            size = body.seek(0, 2)
            body.seek(0)
        request = urllib.request.Request(
            self.url + path,
            data=body,
            method="POST",
            headers={**headers, "Content-Length": str(size), "Authorization": f"Bearer {self.token}"},
        )
        with self._opener.open(request, timeout=self.timeout) as answer:
            text = answer.read()
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PushError(f"{self.url} is not Rollout Inspector: it answered {text[:80]!r}.")
        return found


def push(
    url: str, token: str, run: str | None, records: Iterable[Any] | Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Send records to a run (None creates one) and return what the server counted. Raises :class:`PushError`."""
    return Client(url, token, run).push(records, prefix)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _write_lines(records: Iterable[Any], body: IO[bytes]) -> int:
    n = 0
    with gzip.GzipFile(fileobj=body, mode="wb", compresslevel=1, mtime=0) as out:
        for record in records:
            if isinstance(record, str):
                line = record.encode("utf-8", "surrogatepass")
            elif isinstance(record, bytes):
                line = record
            else:
                line = _dump(record)
            line = line.strip()
            if line:
                out.write(line + b"\n")
                n += 1
    return n


def _dump(record: Any) -> bytes:
    try:
        return json.dumps(record, separators=(",", ":"), default=_plain, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(record), separators=(",", ":"), default=_plain).encode()


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinity, which JSON lacks."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Arrays of any library as lists, mappings as dicts, numbers of numpy as Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON.")


def _seconds(retry_after: str | None) -> float:
    """How long the server asks to wait, at most a minute; 0 where it does not say."""
    return min(float(retry_after), 60.0) if retry_after is not None and retry_after.isdecimal() else 0.0


def _sentence(error: urllib.error.HTTPError) -> str:
    """The server's own sentence, or its HTTP status."""
    with contextlib.suppress(Exception):
        return str(json.loads(error.read(1 << 20))["error"])
    return f"The server answered HTTP {error.code}."
