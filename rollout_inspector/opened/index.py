"""The index of files that are read where they lie: where each trajectory is, its id, its reward and its lengths.

It is a small SQLite database in a cache folder. The files are only read. A plain file of lines is looked through for
the ends of its lines first, which is as fast as the disk; its trajectories are read after that. What other files hold
is known when they are read. docs/decisions/0057-files-in-place.md says why.
"""

import json
import os
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from rollout_inspector import formats
from rollout_inspector.diagnose.checks import Diagnosis, Outcome
from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.formats import FORMATS, FileRefused, Format, Rejected, Source
from rollout_inspector.formats.containers.cutting import holds_lines
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.folders import files_of
from rollout_inspector.formats.shapes import BadLine, decode
from rollout_inspector.guard.audit_settings import AuditSettings, tools_of
from rollout_inspector.guard.checked_files import diagnosis_of
from rollout_inspector.opened.bucket import SCHEME
from rollout_inspector.opened.bucket_mirror import MAX_FILES, BucketMirror, cache_folder
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import links_of, merge_steps, n_new_tokens
from rollout_inspector.streams.trajectory import Trajectory, ids_array

SAMPLE = 20  # Trajectories that are read of each file before the rest of any file is.
FIRST_LIST = 50
FIRST_SECONDS = 1.0
ARRIVAL_SECONDS = 1.0  # While objects of a bucket arrive, those that came are looked at so often.
FOLLOW_SECONDS = 2.0  # Pause before the files are looked at again.
STILL_SECONDS = 5.0  # A file that is read as a whole is read again when nothing was written to it for so long.
BATCH = 500
_VERSION = 3
_TAIL_BYTES = 64
_UNREAD, _READ, _REFUSED = range(3)
_COLUMNS = (
    "id, file, at, state, name, line, problem, reward, prompt_group, training_step, stop_reason, error, n_steps, "
    "n_rows, n_tokens, n_sampled, n_trained, own"
)
_CHECKED = """
    WITH listed AS (SELECT id, coalesce(own, name) AS name, row_number() OVER (
        PARTITION BY coalesce(own, name) ORDER BY id) AS nth FROM trajectory WHERE file = ? AND state = 1),
      checked_ones AS (SELECT rowid AS place, name, row_number() OVER (
        PARTITION BY name ORDER BY start, n) AS nth FROM checked WHERE path = ?)
    SELECT place, id FROM checked_ones JOIN listed USING (name, nth)
"""
_LINES = "SELECT trajectory.*, path, format, way, is_document FROM trajectory JOIN file ON file.id = file"


class FileIndex:
    """The index of some files and folders. Threads may share it."""

    def __init__(self, paths: Sequence[str | Path], settings: AuditSettings | None = None) -> None:
        """A path may be the address of a bucket, which is not asked yet. Raises :class:`Refusal` for a path that is not
        there, ``ValueError`` for a tokenizer that cannot be used."""
        addresses = [path for path in map(str, paths) if path.startswith(SCHEME)]
        local_paths = [path for path in paths if str(path) not in addresses]
        for path in local_paths:
            if not Path(path).expanduser().exists():
                hint = " Of addresses, those that begin with s3:// are read in place." if "://" in str(path) else ""
                raise Refusal(f"There is no file or folder {path}.{hint}")
        self.mirrors = [BucketMirror(address) for address in addresses]
        self.name = ", ".join([*map(str, local_paths), *(mirror.name for mirror in self.mirrors)])
        self.paths = [Path(path).expanduser().absolute() for path in local_paths]
        self.places = [*map(str, self.paths), *addresses]
        self.paths += [mirror.path for mirror in self.mirrors]
        self.settings = settings or AuditSettings()
        self.codec, self.renderer = tools_of(self.settings.tokenizer, self.settings.template)
        self.folder = cache_folder(_VERSION, *map(str, self.paths), self.settings.digest())
        self.is_read, self.problem = threading.Event(), ""
        """Set when :meth:`follow` has read everything once or cannot go on; then the problem says why."""
        self._lock = threading.RLock()
        self._database = sqlite3.connect(self.folder / "index.sqlite3", 20, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.executescript(Path(__file__).with_name("index.sql").read_text(encoding="utf-8"))
        self.close = self._database.close

    def all(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """The lines that a query finds."""
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _write(self, query: str, lines: Iterable[Sequence[Any]]) -> None:
        with self._lock, self._database:
            self._database.executemany(query, lines)

    # -- making it -----------------------------------------------------------------------------------------------------

    def first(self) -> None:
        """Look at the files until a first list is there: some trajectories, or all that there are. Raises
        :class:`Refusal` where a problem left none."""
        end, work = time.monotonic() + FIRST_SECONDS, self.work()
        while (n := len(self.all("SELECT 1 FROM trajectory WHERE state = 1 LIMIT ?", FIRST_LIST))) < FIRST_LIST:
            if (n and time.monotonic() > end) or next(work, self) is self:
                if self.problem and not n:
                    raise Refusal(self.problem)
                return

    def follow(self, stop: threading.Event) -> None:
        """Work until ``stop`` is set, and take up what is written to the files meanwhile."""
        try:
            while not stop.is_set():
                began = time.monotonic()
                for _ in self.work():
                    if stop.is_set():
                        return
                self.is_read.set()
                stop.wait(max(FOLLOW_SECONDS, 5 * (time.monotonic() - began)))
        except Exception as error:  # who waits for the index must learn of it
            self.problem = f"The files are not read any further ({type(error).__name__}: {error}). Open them again."
        finally:
            self.is_read.set()

    def work(self) -> Iterator[None]:
        """Make the index in small pieces of work: a sample of each file, then the lines of all, then the rest. Objects
        of a bucket are fetched before, and found as they come."""
        looked = 0.0
        for is_whole in chain.from_iterable(mirror.work() for mirror in self.mirrors):
            yield
            if is_whole and time.monotonic() > looked + ARRIVAL_SECONDS:
                yield from self._find()
                looked = time.monotonic()
        problem = next((mirror.problem for mirror in self.mirrors if mirror.problem), "")
        self.problem = problem or self.problem
        yield from self._find()
        last = -1
        while unread := self.all("SELECT * FROM trajectory WHERE state = 0 AND id > ? ORDER BY id LIMIT 50", last):
            for line in unread:
                yield from self._read(line)
            last = unread[-1]["id"]
        self.problem = problem

    def _find(self) -> Iterator[None]:
        self._look()
        for file in self.all("SELECT * FROM file WHERE way = '' AND problem = ''"):
            yield from self._begin(file)
        for file in self.all("SELECT * FROM file WHERE way = 'lines' AND NOT is_done"):
            while self._find_lines(file["id"], 20 * BATCH):
                yield

    def _look(self) -> None:
        """Compare the files with what is known of them. What is gone or was replaced is forgotten."""
        files: dict[str, os.stat_result] = {}
        known_files = {file["path"]: file for file in self.all("SELECT * FROM file")}
        for folder in self.paths:
            try:
                for entry in files_of(folder, MAX_FILES):
                    with suppress(OSError):
                        if (state := entry.stat()).st_size or not self.mirrors:
                            files.setdefault(str(entry), state)
            except FileRefused as refusal:
                if len(self.paths) == 1 and not known_files:
                    raise Refusal(str(refusal)) from refusal
        stale = [file["id"] for path, file in known_files.items() if path not in files]
        for path, state in files.items():
            file = known_files.get(path)
            if file is None or (file["size"], file["changed"]) == (state.st_size, state.st_mtime_ns):
                continue
            if file["way"] == "lines" and state.st_size > file["reach"] and _tail(path, file["reach"]) == file["tail"]:
                change = (state.st_size, state.st_mtime_ns, file["id"])
                self._write("UPDATE file SET size = ?, changed = ?, is_done = 0 WHERE id = ?", [change])
            elif file["way"] == "lines" or time.time() - state.st_mtime > STILL_SECONDS:
                stale.append(file["id"])
        self._write("DELETE FROM trajectory WHERE file = ?", ((file,) for file in stale))
        self._write("DELETE FROM file WHERE id = ?", ((file,) for file in stale))
        lines = ((path, state.st_size, state.st_mtime_ns) for path, state in files.items())
        self._write("INSERT OR IGNORE INTO file (path, size, changed) VALUES (?, ?, ?)", lines)

    def _begin(self, file: sqlite3.Row) -> Iterator[None]:
        """Recognise a file, and read a sample of it."""
        parts = ["{}"]
        try:
            source, chosen, way = _recognise(Path(file["path"]), self.settings.format_name)
            if way == "sessions" and chosen.cut is not None:
                parts = [json.dumps(part.to_json()) for part in chosen.cut(source, 1)] or parts
        except (FileRefused, OSError) as error:
            return self._refuse(file["id"], error)
        change = (chosen.name, way, source.is_document, file["id"])
        self._write("UPDATE file SET format = ?, way = ?, is_document = ? WHERE id = ?", [change])
        if way == "lines":
            self._find_lines(file["id"], SAMPLE)
        else:
            self._add(file["id"], parts)
        sample = "SELECT * FROM trajectory WHERE file = ? AND state = 0 ORDER BY id LIMIT ?"
        for line in self.all(sample, file["id"], SAMPLE):
            yield from self._read(line, SAMPLE)

    def _refuse(self, file: int, error: Exception) -> None:
        self._write("UPDATE file SET problem = ?, is_done = 1 WHERE id = ?", [(str(error), file)])

    def _add(self, file: int, parts: Sequence[str]) -> None:
        number = (self.all("SELECT max(id) FROM trajectory")[0][0] or 0) >> 32
        lines = ((number + n << 32, file, part) for n, part in enumerate(parts, start=1))
        self._write("INSERT INTO trajectory (id, file, at) VALUES (?, ?, ?)", lines)

    def _find_lines(self, key: int, most: int) -> bool:
        """Find the next lines of a file; returns whether there may be more."""
        with self._lock:
            (file,) = self.all("SELECT * FROM file WHERE id = ?", key)
            parts, reach, number = [], file["reach"], file["line"]
            try:
                with open(file["path"], "rb", 0) as raw:
                    for place in islice(line_places(raw, reach, number, file["size"]), most):
                        if not place.is_ended and not _is_json(raw, place.start, place.size):
                            break  # it is being written
                        parts.append(json.dumps({"part": [place.start, place.size, place.number]}))
                        reach, number = place.stop, place.number + place.is_ended
                tail = _tail(file["path"], reach)
            except OSError as error:
                self._refuse(key, error)
                return False
            self._add(key, parts)
            change = (reach, number, tail, len(parts) < most, key)
            self._write("UPDATE file SET reach = ?, line = ?, tail = ?, is_done = ? WHERE id = ?", [change])
        return len(parts) == most

    def _read(self, line: sqlite3.Row, most: int | None = None) -> Iterator[None]:
        """Read the trajectories of a part, or the first ``most`` of them, in batches."""
        file = next(iter(self.all("SELECT * FROM file WHERE id = ?", line["file"])), None)
        if file is None:
            return
        at, places, n, problem = json.loads(line["at"]), Counter[int](), 0, ""
        by_line = not at and _reads_alone(FORMATS[file["format"]])
        first, batch = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        try:
            for n, (number, item) in enumerate(islice(self._items(file, at), most), start=1):
                key = line["id"] + n - 1
                if isinstance(item, Rejected):
                    entry = (key, line["file"], "", _REFUSED, None, item.line, item.reason)
                else:
                    place = {"line": number, "place": places[number]} if by_line and number else {"place": n - 1}
                    entry = self._values(key, file, json.dumps({**at, **place}), number, item)
                if by_line and number:
                    places = Counter({number: places[number] + 1})
                (batch if n > 1 else first).append(entry)
                if len(batch) == BATCH:
                    self._keep(batch)
                    yield
        except Exception as error:  # one line must not end the index of all
            is_refused = isinstance(error, FileRefused | OSError)
            problem = str(error) if is_refused else f"The reader itself failed ({type(error).__name__}: {error})."
        if problem or not first:
            problem = problem or "It holds no trajectory."
            batch.append((line["id"] + n + bool(n), line["file"], "", _REFUSED, None, None, problem))
        self._keep(batch + first * (n != most))  # the first entry tells that all are read
        yield

    def _items(self, file: sqlite3.Row, at: dict[str, Any]) -> Iterator[tuple[int | None, Trajectory | Rejected]]:
        """(line, what stands there) of a part of a file."""
        buffer = 1 << 13 if file["way"] == "lines" else 1 << 20
        source, chosen = Source.of_path(file["path"], buffer=buffer), FORMATS[file["format"]]
        source.is_document, part, source.only = bool(file["is_document"]), FilePart.of_json(at), at.get("line")
        source = source if part is None else source.of_part(part, beside=chosen.reads_alone)
        _, items = formats.read(source, chosen.name)
        for item in items:
            yield source.line if chosen.by_line and source.line else None, item

    def _values(
        self, key: int, file: sqlite3.Row, at: str, line: int | None, trajectory: Trajectory
    ) -> tuple[Any, ...]:
        rows = trajectory.rows or merge_steps(trajectory.steps, links_of(trajectory))
        name = trajectory.external_id
        numbered = f"{name[:160]}-line-{line or key}"
        for candidate in (name, f"{Path(file['path']).name}:{name}"[-200:], numbered, f"{numbered}-{key}"):
            if not self.all("SELECT 1 FROM trajectory WHERE name = ? AND id != ?", candidate, key):
                break  # another file may have the id, as in an import
        return (
            key, file["id"], at, _READ, candidate, line, "", trajectory.reward, trajectory.group,
            trajectory.training_step, trajectory.stop_reason, trajectory.error, len(trajectory.steps), len(rows),
            n_new_tokens(trajectory), trajectory.n_sampled,
            sum(row.n_trained for row in trajectory.rows) if trajectory.rows else trajectory.n_sampled,
            None if candidate == name else name,
        )

    def _keep(self, batch: list[tuple[Any, ...]]) -> None:
        n = _COLUMNS.count(",") + 1
        lines = (entry + (None,) * (n - len(entry)) for entry in batch)
        self._write(f"INSERT OR REPLACE INTO trajectory ({_COLUMNS}) VALUES ({', '.join('?' * n)})", lines)
        batch.clear()

    # -- reading it ----------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, bool]:
        """Trajectories that are read, lines that are not yet, and whether no more lines are to be found."""
        counts = dict(map(tuple, self.all("SELECT state, count(*) FROM trajectory GROUP BY state")))
        unfinished = "SELECT 1 FROM file WHERE NOT is_done AND way IN ('', 'lines') AND problem = '' LIMIT 1"
        return counts.get(_READ, 0), counts.get(_UNREAD, 0), not self.all(unfinished)

    def formats(self) -> list[str]:
        """The formats of the files that are looked at so far."""
        return [row[0] for row in self.all("SELECT DISTINCT format FROM file WHERE format != '' ORDER BY format")]

    def rejected(self, most: int = 1000) -> list[Rejected]:
        """Lines and files that are not read, at most so many, and why."""
        columns = "trajectory.line, trajectory.problem, path FROM trajectory JOIN file ON file.id = file"
        lines = self.all(f"SELECT {columns} WHERE state = ? ORDER BY trajectory.id LIMIT ?", _REFUSED, most)
        files = self.all("SELECT NULL, problem, path FROM file WHERE problem != '' ORDER BY id LIMIT ?", most)
        notes = [(None, text, mirror.name + name) for mirror in self.mirrors for name, text in [*mirror.notes.items()]]
        items = [*notes, *((*row[:2], self._address(row[2])) for row in [*files, *lines])]
        return [Rejected(*item) for item in items[:most]]

    def _address(self, path: str) -> str:
        """Of a file, or of the object that was fetched into it."""
        for mirror in self.mirrors:
            if path.startswith(str(mirror.path)):
                return mirror.name.rstrip("/") + path.removeprefix(str(mirror.path))
        return path

    def lines(self, start: int, stop: int) -> list[sqlite3.Row]:
        """The trajectories ``[start, stop)`` of the list. What is not read of them is read now."""
        while True:
            rows = self.all(f"{_LINES} WHERE state != 2 ORDER BY trajectory.id LIMIT ? OFFSET ?", stop - start, start)
            unread = [row for row in rows if row["state"] == _UNREAD]
            if not unread:
                return rows
            for row in unread:
                list(self._read(row))

    def find(self, name: str) -> sqlite3.Row | None:
        """The trajectory of an id, of those that are read."""
        return next(iter(self.all(f"{_LINES} WHERE name = ?", name)), None)

    def load(self, key: int) -> Trajectory:
        """A trajectory, read from its file. Raises :class:`Refusal` where the file is not as it was indexed."""
        (line,) = self.all(f"{_LINES} WHERE trajectory.id = ?", key)
        at, item = json.loads(line["at"]), None
        with suppress(ValueError, OSError):
            _, item = next(islice(self._items(line, at), at.get("place", 0), None), (None, None))
        if not isinstance(item, Trajectory) or (item.reward, n_new_tokens(item)) != (line["reward"], line["n_tokens"]):
            place = self._address(line["path"])
            raise Refusal(f"{place} changed since {line['name']!r} was found in it. Open it again.")
        return replace(item, external_id=line["name"])

    def diagnosed(self, key: int) -> tuple[list[Finding], dict[str, Outcome]]:
        """The findings of a trajectory and what each check came to: made when they are first asked for, then kept."""
        (line,) = self.all("SELECT findings, checks FROM trajectory WHERE id = ?", key)
        if line["findings"] is not None:
            return read_diagnosis(line)
        diagnosis = self.diagnose(key, self.load(key))
        return list(diagnosis.findings), diagnosis.checks

    def diagnose(self, key: int, trajectory: Trajectory, encode_rows: bool = False) -> Diagnosis:
        """Diagnose a trajectory of the list, and keep what was found. ``encode_rows``: as of ``examine``."""
        diagnosis = diagnosis_of(trajectory, self.codec, self.renderer, encode_rows)
        self._write("UPDATE trajectory SET findings = ?, checks = ? WHERE id = ?", [(*written(diagnosis), key)])
        return diagnosis

    def take_checked(self) -> None:
        """Take over what was found by those that check all (``file_audit``), of each file that is checked to its end.

        A finding belongs to the trajectory of the same id, and where a file has an id twice, to that in the same order.
        """
        for file in self.all("SELECT DISTINCT file.* FROM checked JOIN file USING (path, changed)"):
            (n_checked,) = self.all("SELECT count(*) FROM checked WHERE path = ?", file["path"])[0]
            (n_read,) = self.all("SELECT count(*) FROM trajectory WHERE file = ? AND state = 1", file["id"])[0]
            if n_checked == n_read:
                pairs = self.all(_CHECKED, file["id"], file["path"])
                values = "SELECT findings, checks FROM checked WHERE rowid = ?"
                self._write(f"UPDATE trajectory SET (findings, checks) = ({values}) WHERE id = ?", pairs)
                self._write("DELETE FROM checked WHERE path = ?", [(file["path"],)])


def written(diagnosis: Diagnosis) -> tuple[bytes, str]:
    """Findings and checks, as the index keeps them."""
    return (
        msgspec.json.encode(diagnosis.findings, enc_hook=lambda array: array.tolist()), json.dumps(diagnosis.checks),
    )


def read_diagnosis(line: sqlite3.Row) -> tuple[list[Finding], dict[str, Outcome]]:
    """What :func:`written` wrote, from a line of the index."""
    findings = msgspec.json.decode(line["findings"], type=list[Finding], dec_hook=lambda _, ids: ids_array(ids))
    return findings, json.loads(line["checks"])


def _recognise(path: Path, name: str) -> tuple[Source, Format, str]:
    """A file, its format, and how it is read: by ``lines``, by ``sessions`` or ``whole``. Raises `FileRefused`."""
    source = look_at = Source.of_path(path)
    state = path.stat()
    if state.st_blocks * 512 < state.st_size:  # a sparse file, whose holes look like the zeros of a binary file
        with path.open("rb", 0) as raw:
            place = next(line_places(raw, 0, 1, state.st_size), None)
        if place is not None:
            look_at = source.of_part(FilePart(place.start, place.size, place.number), beside=True)
    chosen, _ = formats.read(look_at, name)
    if look_at is source and (source.kind() != "plain" or not holds_lines(source)):
        return source, chosen, "whole"
    if chosen.by_line:
        return source, chosen, "lines" if _reads_alone(chosen) else "whole"
    return source, chosen, "sessions" if chosen.cut else "whole"


def _reads_alone(chosen: Format) -> bool:
    """Whether a line can be read without the lines before it."""
    return chosen.by_line and (chosen.cut is not None or chosen.reads_alone)


def _is_json(raw: Any, start: int, size: int) -> bool:
    raw.seek(start)
    with suppress(BadLine):
        decode(raw.read(size))
        return True
    return False


def _tail(path: str, reach: int) -> bytes:
    """The bytes before a place, by which a file is known again."""
    with open(path, "rb") as raw:
        raw.seek(max(reach - _TAIL_BYTES, 0))
        return raw.read(min(reach, _TAIL_BYTES))


_BLANK = re.compile(rb"[\0\s]*")
_PIECE_BYTES = 4 << 20


class LinePlace(NamedTuple):
    """A line that is not blank: its first byte, bytes and number, and the byte from which the next is looked for."""

    start: int
    size: int
    number: int
    stop: int
    is_ended: bool = True  # False: the file ends in it, so that it may still be written.


def line_places(raw: BinaryIO, start: int, number: int, size: int) -> Iterator[LinePlace]:
    """The lines from byte ``start`` on. Holes of a sparse file are jumped over, and end lines. ``number``: of the first
    line. ``size``: bytes of the file, behind which nothing is read."""
    while start < size:
        try:
            at = os.lseek(raw.fileno(), start, os.SEEK_DATA)
            start = min(os.lseek(raw.fileno(), at, os.SEEK_HOLE), size)
        except OSError:  # a hole up to the end
            return
        begin, piece = None, b""
        raw.seek(at)
        while at < start and (piece := raw.read(min(_PIECE_BYTES, start - at))):
            first = 0
            for end in [*np.flatnonzero(np.frombuffer(piece, np.uint8) == 10).tolist(), len(piece)]:
                if begin is None and (blank := _BLANK.match(piece, first, end)) and blank.end() < end:
                    begin = at + blank.end()
                if end < len(piece):
                    if begin is not None:
                        yield LinePlace(begin, at + end - begin, number, at + end + 1)
                    begin, number, first = None, number + 1, end + 1
            at += len(piece)
        if begin is not None:
            stop = at - len(piece) + len(piece.rstrip(b"\0"))
            yield LinePlace(begin, stop - begin, number, at, is_ended=at < size)
