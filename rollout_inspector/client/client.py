"""Push trajectories to Rollout Inspector, and read what it holds. Standard library only: copy this file where you like.

    from client import Client, push
    push("http://inspector:8000", token, run_code, records)
    for trajectory in Client("http://inspector:8000", token).trajectories(run_code, flawed=True):
        ...

A record is one line of any format that the server imports: a dict, or a line of JSON as text or bytes. Pushing the same
trajectory again changes nothing, so a retry is safe. A recorded session must be pushed whole, in one call.

What is read comes as the JSON of the API, whose fields the server's page ``/api/docs`` describes. Lists are iterators:
they ask for one part after the other.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import math
import random
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

__all__ = ["Client", "PushError", "ServerError", "line_of", "push"]

T = TypeVar("T")

BUSY = (408, 425, 429, 500, 502, 503, 504, 507)
UNTOUCHED = (429, 503, 507)  # Of these: what the server answers before it has begun anything.
IN_MEMORY_BYTES = 8 << 20
COLUMNS = ("ids", "loss_mask", "logprobs", "origin", "step")
ARROW = "application/vnd.apache.arrow.stream"
ENDED = ("done", "failed", "cancelled")


class ServerError(Exception):
    """The server refused a request, or did not answer; the message is its sentence. ``status``: None if unanswered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PushError(ServerError):
    """The server did not take what was pushed; the message says why."""


class FindingOfServer(dict[str, Any]):
    """A finding as the API tells it, with its ``number`` and ``url``; ``tokens()`` reads what it is about."""

    client: Client

    def tokens(self, around: int = 0, columns: Sequence[str] = ()) -> dict[str, list[Any]]:
        """The columns of :meth:`Client.tokens` at its place, with ``around`` tokens more on both sides. The place is in
        the stream of its step, or in its row where it names no step."""
        start, stop = max(self["start"] - around, 0), max(self["stop"], self["start"] + 1) + around
        at = {"row": self["row"] or 0} if self["step"] is None else {"step": self["step"]}
        return self.client.tokens(self["trajectory"], **at, start=start, stop=stop, columns=columns)


class Client:
    """A client for one server and one token. ``run`` is the code of a run; None lets the first push create one."""

    def __init__(
        self, url: str, token: str, run: str | None = None, *, tries: int = 5, wait: float = 0.5, timeout: float = 300.0
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.run = run
        self.is_first = False
        """The next push is the first of its run: where nothing of it is taken, the server deletes the run again."""
        self.tries, self.wait_seconds, self.timeout = max(tries, 1), wait, timeout
        # A redirect could carry the token to another host.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def create_run(self, name: str, tokenizer: str | None = None, chat_template: str | None = None) -> str:
        """Create a run, push to it from now on, return its code. ``tokenizer`` is a name registered on the server."""
        fields = {"name": name, "tokenizer": tokenizer, "chat_template": chat_template}
        body = json.dumps({key: value for key, value in fields.items() if value is not None}).encode()
        self.run = str(self._post("/api/runs", body, {"Content-Type": "application/json"})["run"])
        return self.run

    def push(
        self, records: Iterable[Any] | Mapping[str, Any], prefix: str = "", step: int | None = None
    ) -> dict[str, Any]:
        """Send records and return ``{"run", "trajectories", "known", "rejected": [{"line", "reason"}], ...}``.
        ``prefix`` is put before each id and group. Use one when the ids start again at each training step. ``step`` is
        the training step of all records; None = the one that each record tells."""
        if self.run is None:
            self.create_run("pushed " + time.strftime("%Y-%m-%d %H:%M"))
        is_single = isinstance(records, (Mapping, str, bytes))
        # Written once, compressed, so that a retry sends the same bytes and memory use stays small.
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as body:
            n = 0
            with gzip.GzipFile(fileobj=body, mode="wb", compresslevel=1, mtime=0) as out:
                for line in filter(None, map(line_of, [records] if is_single else records)):
                    out.write(line + b"\n")
                    n += 1
            if n == 0:
                return {"run": self.run, "trajectories": 0, "known": 0, "rejected": []}
            return self._push(body, "application/x-ndjson", prefix, step)

    def push_file(self, file: IO[bytes], prefix: str = "", step: int | None = None) -> dict[str, Any]:
        """Send a whole file of any format, packed or not, and return what :meth:`push` returns."""
        if self.run is None:
            self.create_run("pushed " + time.strftime("%Y-%m-%d %H:%M"))
        return self._push(file, "application/octet-stream", prefix, step)

    def _push(self, body: IO[bytes], kind: str, prefix: str, step: int | None) -> dict[str, Any]:
        first, self.is_first = "yes" if self.is_first else None, False
        parameters = {"prefix": prefix or None, "training_step": step, "first": first}
        query = urllib.parse.urlencode({name: value for name, value in parameters.items() if value is not None})
        path = f"/api/runs/{urllib.parse.quote(str(self.run), safe='')}/trajectories{'?' * bool(query)}{query}"
        return self._post(path, body, {"Content-Type": kind})

    # -- reading -------------------------------------------------------------------------------------------------------

    def runs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yields the runs, newest first. ``filters``: ``text``, ``status``, ``kind``, ``project``."""
        return self._items("runs", filters)

    def get_run(self, code: str) -> dict[str, Any]:
        """One run with its origin and totals."""
        return self._get(f"runs/{code}")

    def summary(self, run: str) -> dict[str, Any]:
        """Counts, rewards, stop reasons, findings by kind and checks of a run."""
        return self._get(f"runs/{run}/summary")

    def training(self, run: str | None = None, **axis: Any) -> dict[str, Any]:
        """A run by training step: figures, what changed, since when. ``axis``: ``by="version"``, bounds."""
        return self._get(f"runs/{run or self.run}/training", axis)

    def gap(self, run: str | None = None) -> dict[str, Any]:
        """How far trainer and sampler of a run are apart, and why; or why there is no ``report``."""
        return self._get(f"runs/{run or self.run}/gap")

    def alarms(self, run: str | None = None) -> dict[str, Any]:
        """The ``alarms`` of a run, and the ``limits`` that hold in it."""
        return self._get(f"runs/{run or self.run}/alarms")

    def frame(self, run: str | None = None, **filters: Any) -> Any:
        """The trajectories of a run as a ``pyarrow.Table``, for ``polars.from_arrow`` or its own ``to_pandas()``.
        ``filters``: as of :meth:`trajectories`. It needs the package pyarrow."""
        pyarrow = import_module("pyarrow")

        def read(answer: Any) -> Any:
            return import_module("pyarrow.ipc").open_stream(answer.read()).read_all()

        parts: list[Any] = []
        while not parts or parts[-1].schema.metadata[b"next"]:
            cursor = parts[-1].schema.metadata[b"next"].decode() if parts else ""
            address = _address(f"runs/{run or self.run}/trajectories", {"limit": 500, **filters, "cursor": cursor})
            parts.append(self._send("GET", address, None, {"Accept": ARROW}, BUSY, read))
        return pyarrow.concat_tables(parts, promote_options="permissive").replace_schema_metadata()

    def compare(self, runs: Sequence[str]) -> dict[str, Any]:
        """Two to six runs side by side."""
        return self._get("compare", {"run": list(runs)})

    def trajectories(self, run: str | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yields the trajectories of a run; None = the run that is pushed to. ``filters``: those of the run's page,
        such as ``finding``, ``status``, ``min``, ``flawed``, and ``sort``. A name that Python keeps for itself ends in
        an underscore: ``from_``."""
        return self._items(f"runs/{run or self.run}/trajectories", filters)

    def trajectory(self, code: str) -> dict[str, Any]:
        """One trajectory, without its tokens."""
        return self._get(f"trajectories/{code}")

    def steps(self, trajectory: str) -> Iterator[dict[str, Any]]:
        """Yields the engine calls of a trajectory, without tokens."""
        return self._items(f"trajectories/{trajectory}/steps", {})

    def step(self, trajectory: str, index: int) -> dict[str, Any]:
        """One engine call with its new messages, tools, reply and other recorded fields."""
        return self._get(f"trajectories/{trajectory}/steps/{index}")

    def rows(self, trajectory: str, strategy: str = "") -> list[dict[str, Any]]:
        """The training rows of a trajectory, without tokens; those of a ``strategy`` where one is named."""
        rows: list[dict[str, Any]] = self._get(f"{_rows(trajectory, strategy)}")["items"]
        return rows

    def tokens(
        self, trajectory: str, row: int = 0, *, step: int | None = None, strategy: str = "", start: int = 0,
        stop: int | None = None, columns: Sequence[str] = (),
    ) -> dict[str, list[Any]]:
        """Token columns ``[start, stop)`` by name: of a row, or of the stream of a ``step``. ``ids``, ``loss_mask``,
        ``logprobs``, ``origin`` and ``step``, and those that a trainer wrote; without what the source lacks.
        ``columns``: only these. A value that is not known is None."""
        at = f"{_rows(trajectory, strategy)}/{row}" if step is None else f"trajectories/{trajectory}/steps/{step}"
        token_columns: dict[str, list[Any]] = {}
        following: int | None = start
        while following is not None and (stop is None or following < stop):
            query = {"start": following, "stop": stop, "columns": ",".join(columns)}
            part = self._get(f"{at}/tokens", query)
            for name, values in {**{name: part[name] for name in COLUMNS}, **part["columns"]}.items():
                if values is not None:
                    token_columns.setdefault(name, []).extend(values)
            following = part["next"]
        return token_columns

    def findings(self, run: str | None = None, *, trajectory: str = "", **filters: Any) -> Iterator[FindingOfServer]:
        """Yields the findings of a run or of a trajectory. ``filters`` of a run: ``kind``, ``severity``."""
        path = f"trajectories/{trajectory}/findings" if trajectory else f"runs/{run or self.run}/findings"
        for value in self._items(path, filters):
            finding = FindingOfServer(value, url=self.url + value["url"])
            finding.client = self
            yield finding

    def finding(self, trajectory: str, number: int) -> dict[str, Any]:
        """One finding of a trajectory by its number, from 1, with the tokens that it is about."""
        return self._get(f"trajectories/{trajectory}/findings/{number}")

    def checks(self) -> Iterator[dict[str, Any]]:
        """Yields the template checks, newest first."""
        return self._items("checks", {})

    def check(self, code: str) -> dict[str, Any]:
        """One template check with its verdict, repair and generation tags."""
        return self._get(f"checks/{code}")

    def check_template(self, **question: Any) -> dict[str, Any]:
        """Have a chat template checked; the check, at once. ``question``: ``chat_template``, ``tokenizer``, ..."""
        return self._ask("checks", question)

    def search(self, text: str, kind: str = "trajectories") -> Iterator[dict[str, Any]]:
        """Yields the ``trajectories`` or ``runs`` that a text finds, newest first."""
        return self._items("search", {"text": text, "kind": kind}, kind, f"next_{kind}")

    def find(self, q: str, by: str = "text", run: str = "", finding: str = "") -> Iterator[dict[str, Any]]:
        """Yields the places of what is looked for in a run, or in all: ``trajectory``, ``row``, ``start``, ``stop``...
        ``by``: ``text``, ``ids`` (``271 * 151657``), ``regex``, ``metadata`` or ``finding``. ``finding``: only in
        trajectories with a finding of this kind."""
        return self._items("search", {"by": by, "q": q, "run": run, "finding": finding}, "results", "next_results")

    def lanes(self, trajectory: str) -> list[dict[str, Any]]:
        """The lanes of a trajectory whose steps form a tree; none where they form one chain."""
        lanes: list[dict[str, Any]] = self._get(f"trajectories/{trajectory}/lanes")["items"]
        return lanes

    # -- together ------------------------------------------------------------------------------------------------------

    def comments(self, trajectory: str) -> list[dict[str, Any]]:
        """The comments on a trajectory: on all of it first, then by their place."""
        comments: list[dict[str, Any]] = self._get(f"trajectories/{trajectory}/comments")["comments"]
        return comments

    def comment(
        self, trajectory: str, text: str, row: int | None = None, start: int | None = None, stop: int | None = None
    ) -> dict[str, Any]:
        """Write a comment: on tokens ``[start, stop)`` of a row, or without ``start`` on the whole trajectory."""
        place = {"row": row, "start": start, "stop": stop}
        return self._ask(f"trajectories/{trajectory}/comments", {"text": text, **place})

    def edit_comment(self, trajectory: str, comment: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Give one's own comment, as it was read, another text."""
        body = {"text": text, "version": comment["version"]}
        return self._ask(f"trajectories/{trajectory}/comments/{comment['code']}/edit", body)

    def resolve(self, trajectory: str, comment: str) -> dict[str, Any]:
        """Say that the comment with this code is settled."""
        return self._ask(f"trajectories/{trajectory}/comments/{comment}/resolve", {})

    def reopen(self, trajectory: str, comment: str) -> dict[str, Any]:
        """Say that the comment with this code is not settled."""
        return self._ask(f"trajectories/{trajectory}/comments/{comment}/reopen", {})

    def delete_comment(self, trajectory: str, comment: str) -> None:
        """Delete a comment: one's own, or as an admin of the project any."""
        self._delete(f"trajectories/{trajectory}/comments/{comment}")

    def mark_seen(self, trajectory: str, seen: bool = True) -> None:
        """Mark a trajectory as seen by the maker of the API key, or as not seen."""
        self._ask(f"trajectories/{trajectory}/seen", {"seen": seen})

    def muted(self, run: str | None = None) -> list[dict[str, Any]]:
        """The kinds of findings that are muted in a run, with reason and ``id``."""
        rules: list[dict[str, Any]] = self._get(f"runs/{run or self.run}/muted")["items"]
        return rules

    def mute(self, kind: str, reason: str, run: str | None = None, scope: str = "run") -> dict[str, Any]:
        """Mute a kind of finding in a ``run``, in runs with its chat ``template``, or in the ``project``."""
        body = {"kind": kind, "reason": reason, "scope": scope}
        return self._ask(f"runs/{run or self.run}/muted", body)

    def unmute(self, id: int) -> None:
        """Take back a rule of :meth:`muted`."""
        self._delete(f"muted/{id}")

    # -- work ----------------------------------------------------------------------------------------------------------

    def jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yields the jobs, newest first. ``filters``: ``status``, ``kind``, ``run``."""
        return self._items("jobs", filters)

    def job(self, code: str) -> dict[str, Any]:
        """One job: how far it is."""
        return self._get(f"jobs/{code}")

    def wait(self, job: str | Mapping[str, Any], seconds: float = 3600.0, every: float = 1.0) -> dict[str, Any]:
        """The job when it is done. Raises :class:`ServerError` when it fails, is cancelled, or takes too long."""
        code, end = job if isinstance(job, str) else str(job["code"]), time.monotonic() + seconds
        while (current := self.job(code))["status"] not in ENDED:
            if time.monotonic() > end:
                raise ServerError(f"The job {code} is not done after {seconds:g} s. {current['sentence']}")
            time.sleep(every)
        if current["status"] != "done":
            raise ServerError(f"The job {code} ended as {current['status']}. {current['error'] or current['sentence']}")
        return current

    def diagnose(self, run: str | None = None, tokenizer: str = "") -> dict[str, Any]:
        """Have a run diagnosed again. Returns the job."""
        return self._ask(f"runs/{run or self.run}/diagnose", {"tokenizer": tokenizer})

    def replay(self, trajectory: str, seconds: float = 3600.0) -> dict[str, Any]:
        """What every strategy makes of a trajectory, when the replay is there."""
        self.wait(self._ask(f"trajectories/{trajectory}/replay", {})["job"], seconds)
        return self._get(f"trajectories/{trajectory}/strategies")

    def fork(self, trajectory: str, **settings: Any) -> dict[str, Any]:
        """Continue a trajectory: ``row`` and ``at``, or the number of a ``finding``; ``samples``, ``seed``, ..."""
        return self._ask(f"trajectories/{trajectory}/forks", {"settings": settings})

    def forks(self, trajectory: str) -> dict[str, Any]:
        """The newest ``forks`` of a trajectory with their continuations, and the ``effects`` of breaks."""
        return self._get(f"trajectories/{trajectory}/forks")

    def export(self, path: str | Path, run: str | None = None, *, seconds: float = 3600.0, **how: Any) -> Path:
        """Have a run written, and keep the file at ``path``. ``how``: ``format``, ``strategy``, ``leave_out``, ..."""
        job = self.wait(self._ask(f"runs/{run or self.run}/exports", how), seconds)
        return self._keep(path, f"jobs/{job['code']}/file")

    def save(self, path: str | Path, trajectory: str, **what: Any) -> Path:
        """Keep a trajectory at ``path`` as one HTML file. ``what``: ``row``, ``finding``, ``view``, ``lens``,
        ``comments="no"``."""
        return self._keep(path, f"trajectories/{trajectory}/file", what)

    def page(self, trajectory: str, **what: Any) -> str:
        """The same file as text."""
        path = _address(f"trajectories/{trajectory}/file", what)
        return self._send("GET", path, None, {}, BUSY, lambda answer: str(answer.read().decode()))

    def parsers(self, trajectory: str, step: int, seconds: float = 600.0) -> dict[str, Any]:
        """What every parser reads of the reply of a step, and what its message lost, when a worker has read it."""
        at = f"trajectories/{trajectory}/steps/{step}/parsers"
        answer = self._get(at)
        if answer["state"] != "done":
            answer = answer if answer["state"] in ("queued", "running") else self._ask(at, {})
            self.wait(answer["job"], seconds)
            answer = self._get(at)
        audit: dict[str, Any] = answer["audit"]
        return audit

    # -- requests ------------------------------------------------------------------------------------------------------

    def _items(
        self, path: str, filters: Mapping[str, Any], items: str = "items", following: str = "next"
    ) -> Iterator[dict[str, Any]]:
        cursor: str | None = ""
        while cursor is not None:
            part = self._get(path, {"limit": 500, **filters, "cursor": cursor})
            yield from part[items]
            cursor = part[following]

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._send("GET", _address(path, query or {}), None, {}, BUSY, self._object)

    def _keep(self, path: str | Path, source: str, query: Mapping[str, Any] | None = None) -> Path:
        """The file at an address, kept at ``path``."""

        def keep(answer: Any) -> Path:
            with open(path, "wb") as file:
                shutil.copyfileobj(answer, file)
            return Path(path)

        return self._send("GET", _address(source, query or {}), None, {}, BUSY, keep)

    def _delete(self, path: str) -> None:
        self._send("DELETE", f"/api/v1/{path}", None, {}, BUSY, lambda answer: None)

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST JSON. It is sent again only where the server has begun nothing."""
        return self._send("POST", f"/api/v1/{path}", json.dumps(body).encode(), _JSON, UNTOUCHED, self._object)

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> dict[str, Any]:
        try:
            return self._send("POST", path, body, headers, BUSY, self._object)
        except ServerError as error:
            raise PushError(str(error), error.status) from None

    def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str], again: Sequence[int], read: Callable[[Any], T]
    ) -> T:
        """What ``read`` makes of the answer to a request. It is sent again after the statuses ``again``."""
        failure = ServerError(f"{self.url} was not asked.")
        wait_seconds = 0.0
        for attempt in range(self.tries):
            if attempt:
                time.sleep(
                    max(min(self.wait_seconds * 2 ** (attempt - 1), 30.0), wait_seconds) * random.uniform(1.0, 1.5)
                )
            try:
                request = self._request(method, path, body, headers)
                with self._opener.open(request, timeout=self.timeout) as answer:
                    return read(answer)
            except urllib.error.HTTPError as error:
                with error:
                    failure = ServerError(_sentence(error), error.code)
                    wait_seconds = _seconds(error.headers.get("Retry-After"))
                if error.code not in again:
                    break
            except (OSError, http.client.HTTPException) as error:
                failure = ServerError(f"{self.url} does not answer: {getattr(error, 'reason', None) or error!r}.")
                if 502 not in again:  # it may have been begun
                    break
        raise failure

    def _request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> urllib.request.Request:
        sent = {**headers, "Authorization": f"Bearer {self.token}"}
        if isinstance(body, bytes):
            sent["Content-Length"] = str(len(body))
        elif body is not None:
            sent["Content-Length"] = str(body.seek(0, 2))
            body.seek(0)
        return urllib.request.Request(self.url + path, data=body, method=method, headers=sent)

    def _object(self, answer: Any) -> dict[str, Any]:
        text = answer.read()
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(f"{self.url} is not Rollout Inspector: it answered {text[:80]!r}.")
        return value


def push(
    url: str, token: str, run: str | None, records: Iterable[Any] | Mapping[str, Any], prefix: str = "",
    step: int | None = None,
) -> dict[str, Any]:
    """Send records to a run (None creates one) and return what the server counted. Raises :class:`PushError`."""
    return Client(url, token, run).push(records, prefix, step)


_JSON = {"Content-Type": "application/json"}


def _address(path: str, query: Mapping[str, Any]) -> str:
    parameters = {
        name.rstrip("_"): str(value).lower() if isinstance(value, bool) else value
        for name, value in query.items()
        if value not in (None, "")
    }
    return f"/api/v1/{path}" + (f"?{urllib.parse.urlencode(parameters, doseq=True)}" if parameters else "")


def _rows(trajectory: str, strategy: str) -> str:
    return f"trajectories/{trajectory}" + (f"/strategies/{strategy}" if strategy else "") + "/rows"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def line_of(record: Any) -> bytes:
    """A record as one line of JSON without its end. Raises ``TypeError`` for a value that JSON cannot hold."""
    if isinstance(record, str):
        return record.encode("utf-8", "surrogatepass").strip()
    if isinstance(record, bytes):
        return record.strip()
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
    """Arrays of any library as lists, mappings and pydantic models as dicts, numbers of numpy as Python numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON.")


def _seconds(retry_after: str | None) -> float:
    """How long the server asks to wait, at most a minute; 0 where it does not say."""
    return min(float(retry_after), 60.0) if retry_after is not None and retry_after.isdecimal() else 0.0


def _sentence(error: urllib.error.HTTPError) -> str:
    """The server's own sentence, or its HTTP status."""
    with contextlib.suppress(Exception):
        body = json.loads(error.read(1 << 20))
        return str(body["detail"] if "detail" in body else body["error"])
    return f"The server answered HTTP {error.code}."
