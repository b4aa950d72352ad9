"""What ``rollout_inspector.open`` returns: trajectories of files where they lie, or of a server, by one interface."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from rollout_inspector.client.client import Client
from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.opened.drawing import drawn_list, framed, trajectory_page
from rollout_inspector.opened.index import BATCH, FileIndex
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Origin, Row, ids_array

MAX_DRAWN = 20  # Trajectories of a list in a notebook.
COLUMNS = {
    "id": "name", "reward": "reward", "group": "prompt_group", "training_step": "training_step",
    "stop_reason": "stop_reason", "error": "error", "steps": "n_steps", "rows": "n_rows", "tokens": "n_tokens",
    "sampled": "n_sampled", "file": "path", "line": "line",
}
"""What a list tells of a trajectory -> the column of the index that holds it."""
Line = dict[str, Any]  # What a list tells of a trajectory, and ``key``, by which it is found again.


class OpenedTrajectory:
    """A trajectory of a run that was opened. Its tokens are read when they are first asked for."""

    def __init__(self, run: OpenedRun, line: Line) -> None:
        self._run, self.line = run, line
        self.id, self.reward = str(line["id"]), line["reward"]

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Its training rows: ``ids``, ``loss_mask`` and ``logprobs`` are arrays ``[T]``."""
        return self._run.rows(self.line["key"])

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong with it, in reading order."""
        return self._run.findings(self.line["key"])

    def __repr__(self) -> str:
        return f"<trajectory {self.id!r}: {self.line['steps']} steps, {self.line['tokens']} tokens>"

    def _repr_html_(self) -> str:
        return framed(self._run.page(self.line))


class Trajectories(Sequence[OpenedTrajectory]):
    """The trajectories of a run as a sequence that reads what is looked at. A slice is one too."""

    def __init__(self, run: OpenedRun, part: range | None = None) -> None:
        self._run, self._part = run, part

    def __len__(self) -> int:
        return self._run.count() if self._part is None else len(self._part)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Trajectories(self._run, self._places(place.stop)[place])
        at = self._places(place + 1 if place >= 0 else None)[place]
        return OpenedTrajectory(self._run, self._run.lines(at, at + 1)[0])

    def _places(self, stop: int | None) -> range:
        """The places in the list. Nobody waits for what stands behind ``stop``; None = the end."""
        if self._part is not None:
            return self._part
        is_there = stop is not None and stop > 0 and self._run.lines(stop - 1, stop)
        return range(stop or 0) if is_there else range(len(self))

    def __iter__(self) -> Iterator[OpenedTrajectory]:
        return (OpenedTrajectory(self._run, line) for line in self._lines())

    def _lines(self) -> Iterator[Line]:
        part = range(1 << 62) if self._part is None else self._part
        size = BATCH if part.step == 1 else 1
        for n in range(0, len(part), size):
            if not (lines := self._run.lines(part[n], part[min(n + size, len(part)) - 1] + 1)):
                return
            yield from lines

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns by name, with a value for each trajectory. All of them are read for it."""
        lines = list(self._lines())
        return {name: [line.get(name) for line in lines] for name in COLUMNS}

    def to_polars(self) -> Any:
        """The same as a table of polars. Raises :class:`Refusal` where that is not installed."""
        return _package("polars").DataFrame(self.to_dict(), infer_schema_length=None)

    def to_pandas(self) -> Any:
        """The same as a table of pandas. Raises :class:`Refusal` where that is not installed."""
        return _package("pandas").DataFrame(self.to_dict())

    def _repr_html_(self) -> str:
        part = range(MAX_DRAWN) if self._part is None else self._part[:MAX_DRAWN]
        return drawn_list(self._run.name, list(Trajectories(self._run, part)._lines()), list(COLUMNS))


class OpenedRun:
    """A run that was opened: ``run.trajectories``, ``run["id"]``. A ``with`` block closes it."""

    name: str

    @property
    def trajectories(self) -> Trajectories:
        """All of them, in the order of the files or of the server."""
        return Trajectories(self)

    def __getitem__(self, name: str) -> OpenedTrajectory:
        if (line := self.find(name)) is None:
            raise KeyError(f"{self.name} has no trajectory {name!r}. `run.trajectories` lists the ids.")
        return OpenedTrajectory(self, line)

    def __repr__(self) -> str:
        return f"<run {self.name}>"

    def _repr_html_(self) -> str:
        return self.trajectories._repr_html_()

    def __enter__(self) -> OpenedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading in the background."""

    # What a place of trajectories tells. ``key``: as a line has it.
    count: Callable[[], int]
    lines: Callable[[int, int], list[Line]]
    find: Callable[[str], Line | None]
    rows: Callable[[Any], Sequence[Row]]
    findings: Callable[[Any], list[Finding]]
    page: Callable[[Line], str]


class FileRun(OpenedRun):
    """Files and folders where they lie, or objects of a bucket. A thread reads on, and follows what is written."""

    def __init__(self, paths: Sequence[str | Path], settings: AuditSettings) -> None:
        self.index = FileIndex(paths, settings)
        self.name = self.index.name
        self.index.first()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.index.follow, args=(self._stop,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.index.close()

    def _wait(self) -> None:
        self.index.is_read.wait()
        if self.index.problem:
            raise Refusal(self.index.problem)

    def count(self) -> int:
        self._wait()
        return self.index.counts()[0]

    def lines(self, start: int, stop: int) -> list[Line]:
        rows = self.index.lines(start, stop)
        if len(rows) < stop - start and not self.index.is_read.is_set():
            self._wait()
            rows = self.index.lines(start, stop)
        return [self._line(row) for row in rows]

    def _line(self, row: Any) -> Line:
        return {"key": row["id"], **{name: row[column] for name, column in COLUMNS.items()}}

    def find(self, name: str) -> Line | None:
        if (row := self.index.find(name)) is None:
            self._wait()
            row = self.index.find(name)
        return None if row is None else self._line(row)

    def rows(self, key: int) -> Sequence[Row]:
        return rows_of(self.index.load(key))

    def findings(self, key: int) -> list[Finding]:
        return self.index.diagnosed(key)[0]

    def page(self, line: Line) -> str:
        table = None if self.index.codec is None else self.index.codec.table
        return trajectory_page(self.index.load(line["key"]), *self.index.diagnosed(line["key"]), table, line)


class ServerRun(OpenedRun):
    """A run of a server, or all runs that the token may see, the newest first."""

    def __init__(self, url: str, token: str, run: str = "") -> None:
        address, path = urlsplit(url), urlsplit(url).path.strip("/").split("/")
        run = run or (path[-1] if path[:-1] == ["runs"] else "")
        self.name, self.client = url, Client(f"{address.scheme}://{address.netloc}", token)
        self._runs = [self.client.get_run(run)] if run else list(self.client.runs())
        self._known: list[Line] = []
        self._more = (line for item in self._runs for line in self.client.trajectories(item["code"]))

    def count(self) -> int:
        return sum(run["trajectories"] for run in self._runs)

    def lines(self, start: int, stop: int) -> list[Line]:
        while len(self._known) < stop and (item := next(self._more, None)) is not None:
            self._known.append({**item, "id": item["external_id"], "key": item["code"]})
        return self._known[start:stop]

    def find(self, name: str) -> Line | None:
        items = self.trajectories._lines()
        return next((line for line in items if name in (line["id"], line["key"])), None)

    def rows(self, key: str) -> Sequence[Row]:
        return [self._row(key, line) for line in self.client.rows(key)]

    def _row(self, key: str, line: Line) -> Row:
        tokens: dict[str, Any] = {"ids": [], "loss_mask": [], **self.client.tokens(key, line["index"])}
        slugs = [origin.slug for origin in Origin]
        origin = [slugs.index(slug) for slug in tokens.get("origin", ())]
        names = [name for name in ("logprobs", *line["columns"]) if name in tokens]
        columns = {name: np.array(tokens[name], np.float32) for name in names}
        return Row(
            ids_array(tokens["ids"]), np.array(tokens["loss_mask"], np.bool_), columns.pop("logprobs", None),
            np.array(origin, np.uint8) if origin else None, columns, tuple(line["steps"]),
        )

    def findings(self, key: str) -> list[Finding]:
        numbers = range(1, 1 + sum(1 for _ in self.client.findings(trajectory=key)))
        return [_finding(self.client.finding(key, number)) for number in numbers]

    def page(self, line: Line) -> str:
        return self.client.page(line["key"], comments="no")


def _finding(whole: dict[str, Any]) -> Finding:
    values = {**whole.pop("finding"), **whole}
    return msgspec.convert(values, Finding, dec_hook=lambda _, ids: ids_array(ids))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Refusal(f"The package {name} is not installed. Install it: pip install {name}") from None


def open_run(
    place: str | Path | Sequence[str | Path], token: str = "", *, run: str = "", tokenizer: str | Path = "",
    chat_template: str = "",
) -> OpenedRun:
    """Open files where they lie, a bucket by its address ``s3://BUCKET/PREFIX``, or a server by its address and an API
    key. Raises :class:`Refusal`. ``run``: of a server the code of one run, which may stand in the address too.
    ``tokenizer`` is the folder of the policy's, without which what needs text is not decided; ``chat_template`` the
    text of its template."""
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        return ServerRun(place, token, run)
    paths = [place] if isinstance(place, str | Path) else list(place)
    folder = str(Path(tokenizer).expanduser().absolute()) if tokenizer else ""
    return FileRun(paths, AuditSettings(folder, chat_template))
