"""What ``rollout_inspector.open`` returns: trajectories of files where they lie, or of a server, by one interface."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Protocol, overload
from urllib.parse import urlsplit

import numpy as np

from rollout_inspector.client.client import Client
from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.guard.shard_audit import AuditSettings
from rollout_inspector.opened.drawing import framed, trajectory_page
from rollout_inspector.opened.index import COLUMNS, Index
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Origin, Row, Trajectory, ids_array

BATCH = 500
MAX_DRAWN = 20
"""Trajectories of a list in a notebook."""
Line = dict[str, Any]
"""What a list tells of a trajectory, by the names of :data:`COLUMNS`, and ``key``, by which it is found again."""


class TrajectorySource(Protocol):
    """Where the trajectories come from."""

    name: str

    def count(self) -> int:
        """Trajectories of the list."""

    def lines(self, start: int, stop: int) -> list[Line]:
        """The trajectories ``[start, stop)`` of the list."""

    def find(self, name: str) -> Line | None:
        """The trajectory of an id."""

    def rows(self, key: Any) -> Sequence[Row]:
        """The training rows of a trajectory."""

    def findings(self, key: Any) -> list[Finding]:
        """What is wrong with it."""

    def html(self, line: Line) -> str:
        """The trajectory as a page of its own."""


class OpenedTrajectory:
    """A trajectory of a run that was opened. Its tokens are read when they are first asked for."""

    def __init__(self, source: TrajectorySource, line: Line) -> None:
        self._source, self.line = source, line
        self.id: str = line["id"]
        self.reward: float | None = line["reward"]

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Its training rows: ``ids``, ``loss_mask`` and ``logprobs`` are arrays ``[T]``."""
        return self._source.rows(self.line["key"])

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong with it, in reading order."""
        return self._source.findings(self.line["key"])

    def __repr__(self) -> str:
        return f"<trajectory {self.id}: {self.line['steps']} steps, {self.line['tokens']} tokens>"

    def _repr_html_(self) -> str:
        return framed(self._source.html(self.line))


class Trajectories(Sequence[OpenedTrajectory]):
    """The trajectories of a run as a sequence that reads what is looked at."""

    def __init__(self, source: TrajectorySource, part: range | None = None) -> None:
        self._source, self._part = source, part

    @property
    def _places(self) -> range:
        return range(self._source.count()) if self._part is None else self._part

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> OpenedTrajectory: ...
    @overload
    def __getitem__(self, place: slice) -> Trajectories: ...
    def __getitem__(self, place: int | slice) -> OpenedTrajectory | Trajectories:
        if isinstance(place, slice):
            return Trajectories(self._source, self._places[place])
        at = place if self._part is None and place >= 0 else self._places[place]
        lines = self._source.lines(at, at + 1)
        if not lines:
            raise IndexError(f"There is no trajectory {place}.")
        return OpenedTrajectory(self._source, lines[0])

    def __iter__(self) -> Iterator[OpenedTrajectory]:
        return (OpenedTrajectory(self._source, line) for line in self._lines())

    def _lines(self) -> Iterator[Line]:
        if self._part is not None and self._part.step != 1:
            for place in self._part:
                yield from self._source.lines(place, place + 1)
            return
        start, stop = (0, None) if self._part is None else (self._part.start, self._part.stop)
        while stop is None or start < stop:
            lines = self._source.lines(start, start + BATCH if stop is None else min(start + BATCH, stop))
            if not lines:
                return
            yield from lines
            start += len(lines)

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns by name, with a value for each trajectory. All of them are read for it."""
        columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for line in self._lines():
            for name, values in columns.items():
                values.append(line.get(name))
        return columns

    def to_polars(self) -> Any:
        """The same as a table of polars. Raises :class:`Refusal` where that is not installed."""
        return _package("polars").DataFrame(self.to_dict(), infer_schema_length=None)

    def to_pandas(self) -> Any:
        """The same as a table of pandas. Raises :class:`Refusal` where that is not installed."""
        return _package("pandas").DataFrame(self.to_dict())

    def __repr__(self) -> str:
        return f"<trajectories of {self._source.name}>"

    def _repr_html_(self) -> str:
        part = self._places[:MAX_DRAWN] if self._part is not None else range(MAX_DRAWN)
        lines = self._source.lines(part.start, part.stop)
        names = [name for name in COLUMNS if any(line.get(name) not in (None, "") for line in lines)]
        rows = [[str(line.get(name, ""))[:80] for name in names] for line in lines]
        head, *body = ("".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in [names, *rows])
        table = "".join(f"<tr>{cells}</tr>" for cells in body)
        note = f"<p>The first {len(lines)}.</p>" if len(lines) == MAX_DRAWN else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table>{note}"


class OpenedRun:
    """A run that was opened: ``run.trajectories``, ``run["id"]``. A ``with`` block closes it."""

    def __init__(self, source: TrajectorySource) -> None:
        self._source = source
        self.trajectories = Trajectories(source)

    def __getitem__(self, name: str) -> OpenedTrajectory:
        line = self._source.find(name)
        if line is None:
            raise KeyError(f"{self._source.name} has no trajectory {name!r}. `run.trajectories` lists the ids.")
        return OpenedTrajectory(self._source, line)

    def __repr__(self) -> str:
        return f"<run {self._source.name}>"

    def _repr_html_(self) -> str:
        return f"<h4>{escape(self._source.name)}</h4>{self.trajectories._repr_html_()}"

    def close(self) -> None:
        """Stop reading in the background."""
        if isinstance(self._source, FileSource):
            self._source.close()

    def __enter__(self) -> OpenedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileSource:
    """Trajectories of files and folders. A thread reads on and follows what is written to them."""

    def __init__(self, paths: Sequence[str | Path], settings: AuditSettings | None = None) -> None:
        self.name = ", ".join(map(str, paths))
        self.index = Index(paths, settings)
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
        return self.index.progress().n_read

    def lines(self, start: int, stop: int) -> list[Line]:
        rows = self.index.lines(start, stop)
        if len(rows) < stop - start and not self.index.is_read.is_set():
            self._wait()
            rows = self.index.lines(start, stop)
        return [self._line(row) for row in rows]

    def _line(self, row: Any) -> Line:
        return {"key": row["id"], **{name: row[column] for name, column in COLUMNS.items()}}

    def find(self, name: str) -> Line | None:
        row = self.index.find(name)
        if row is None:
            self._wait()
            row = self.index.find(name)
        return None if row is None else self._line(row)

    def rows(self, key: int) -> Sequence[Row]:
        return rows_of(self.index.load(key))

    def findings(self, key: int) -> list[Finding]:
        return self.index.diagnosed(key)[0]

    def html(self, line: Line) -> str:
        trajectory: Trajectory = self.index.load(line["key"])
        findings, checks = self.index.diagnosed(line["key"])
        table = None if self.index.codec is None else self.index.codec.table
        return trajectory_page(trajectory, findings, checks, table, f"{line['file']}, line {line['line']}")


class ServerSource:
    """Trajectories of a server: of one run, or of all that the token may see, the newest run first."""

    def __init__(self, url: str, token: str, run: str = "") -> None:
        address, path = urlsplit(url), urlsplit(url).path.strip("/").split("/")
        if path[:-1] == ["runs"]:
            run = run or path[-1]
        self.client = Client(f"{address.scheme}://{address.netloc}", token)
        self._runs = [self.client.get_run(run)] if run else list(self.client.runs())
        self.name = f"{url} {self._runs[0]['name']}" if len(self._runs) == 1 else url
        self._lines: list[Line] = []
        self._more = (line for run in self._runs for line in self.client.trajectories(run["code"]))

    def _read_to(self, stop: int | None) -> None:
        while stop is None or len(self._lines) < stop:
            item: Mapping[str, Any] | None = next(self._more, None)
            if item is None:
                return
            self._lines.append({**item, "id": item["external_id"], "key": item["code"]})

    def count(self) -> int:
        return sum(run["trajectories"] for run in self._runs)

    def lines(self, start: int, stop: int) -> list[Line]:
        self._read_to(stop)
        return self._lines[start:stop]

    def find(self, name: str) -> Line | None:
        place = 0
        while True:
            self._read_to(place + 1)
            if place == len(self._lines):
                return None
            if name in (self._lines[place]["id"], self._lines[place]["key"]):
                return self._lines[place]
            place += 1

    def rows(self, key: str) -> Sequence[Row]:
        return [self._row(key, line) for line in self.client.rows(key)]

    def _row(self, key: str, line: Mapping[str, Any]) -> Row:
        columns: dict[str, Any] = self.client.tokens(key, line["index"])
        n, slugs = line["n_tokens"], [origin.slug for origin in Origin]
        ids, mask = columns.pop("ids", []), columns.pop("loss_mask", [])
        logprobs, origin = columns.pop("logprobs", None), columns.pop("origin", None)
        columns.pop("step", None)
        return Row(
            ids_array(ids), np.array(mask, np.bool_), None if logprobs is None else _floats(logprobs, n),
            None if origin is None else np.array([slugs.index(slug) for slug in origin], np.uint8),
            {name: _floats(values, n) for name, values in columns.items()}, tuple(line["steps"]),
        )

    def findings(self, key: str) -> list[Finding]:
        return [_finding(self.client, key, number) for number, _ in enumerate(self.client.findings(trajectory=key), 1)]

    def html(self, line: Line) -> str:
        return self.client.page(line["key"])


def _floats(values: Sequence[float | None], n: int) -> Any:
    return np.array([np.nan if value is None else value for value in values], np.float32).reshape(n)


def _finding(client: Client, key: str, number: int) -> Finding:
    whole = client.finding(key, number)
    values = whole["finding"]
    plain = ("kind", "step", "row", "start", "stop", "expected_text", "actual_text", "evidence", "remedy", "missing")
    return Finding(
        axis=Axis(values["axis"]), severity=Severity(values["severity"]), cost=Cost(**values["cost"]),
        expected_ids=ids_array(whole["expected_ids"]), actual_ids=ids_array(whole["actual_ids"]),
        places=tuple((start, stop) for start, stop in values["places"]), **{name: values[name] for name in plain},
    )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Refusal(f"The package {name} is not installed. Install it: pip install {name}") from None


def open_run(
    place: str | Path | Sequence[str | Path], token: str = "", *, run: str = "", tokenizer: str | Path = "",
    chat_template: str = "",
) -> OpenedRun:
    """Open files where they lie, or a server by its address and an API key. Raises :class:`Refusal`.

    ``run``: of a server the code of one run, which may stand in the address too. ``tokenizer`` is the folder of the
    policy's, without which what needs text is not decided; ``chat_template`` the text of its template.
    """
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        return OpenedRun(ServerSource(place, token, run))
    paths = [place] if isinstance(place, str | Path) else list(place)
    folder = str(Path(tokenizer).expanduser().absolute()) if tokenizer else ""
    return OpenedRun(FileSource(paths, AuditSettings(folder, chat_template)))
