"""What a format is, and what readers share."""

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib.metadata import entry_points
from typing import IO, Any

import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.containers.cutting import parts_of
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.containers.refusals import FileRefused
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.shapes import BadLine, decode
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory

NO_REQUESTS = (
    "The requests are not in the file, so a difference that follows from a message or a template is not decidable."
)
PART_OF_REQUESTS = (
    "The requests are not whole in the file, so what follows from a message or a template is not decidable."
)
ROWS_ALONE = (
    "These are the trainer's rows: which engine calls they came from, and what the engine read, is not in the file."
)
"""What a file lacks, for formats that lack the same."""
GROUP = "rollout_inspector.formats"  # The group of entry points in which other packages name formats.
_BY_LINE = re.compile(r"line-\d+(-\d+)*(-row-\d+)?")

_log = logging.getLogger(__name__)


def is_named_by_line(trajectory: Trajectory) -> bool:
    """Whether a reader named the trajectory by its line, because the source has no id."""
    return _BY_LINE.fullmatch(trajectory.external_id) is not None


@dataclass(frozen=True)
class Rejected:
    """A line that was not read, with a sentence that says why."""

    line: int | None
    reason: str
    file: str = ""  # Where it is among lines of several files.


Detect = Callable[[Sequence[Any]], bool]  # Whether the first values of a file (decoded lines) are of a format.
Read = Callable[[Source], Iterator[Trajectory | Rejected]]
Write = Callable[[Iterable[Trajectory], IO[bytes]], int]  # Writes trajectories and returns their number.
Join = Callable[[Iterable[IO[bytes]], IO[bytes]], None]
"""Writes one file that holds what several files of a format hold, in their order."""
Cut = Callable[[Source, int], list[FilePart]]
"""Parts of about so many bytes, in the order of the file; empty if it cannot be cut. Raises :class:`FileRefused`."""


@dataclass(frozen=True)
class Format:
    """A foreign format, or our own."""

    name: str
    title: str
    detect: Detect
    read: Read
    lacks: str = ""  # What such a file cannot tell, as a sentence; empty = nothing is missing.
    write: Write | None = None
    suffix: str = ".jsonl"
    join: Join | None = None
    """Makes one file of those that :attr:`write` wrote of parts; None = a file is written in one."""
    cut: Cut | None = None
    """Cuts a large file into parts, which workers read side by side and which together read like the file."""
    by_line: bool = True  # A trajectory stands on the line that was read last. False = its calls stand on many lines.
    reads_alone: bool = False
    """A line can be read without the others, although no part can be cut: it needs the files beside it."""
    is_lossless: bool = False
    """Every field is kept as it is: our own formats. Elsewhere arrays of expert routing are summarised."""


def installed_formats() -> Iterator[Format]:
    """The formats of other packages, by the name of their entry point; what cannot be used is left out and logged."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            format = entry.load()
        except Exception as error:  # one package must not stop the reading of all files
            _log.warning("The format %s cannot be loaded from %s: %s", entry.name, entry.value, error)
            continue
        if isinstance(format, Format):
            yield _guarded(format)
        else:
            _log.warning("The entry point %s of formats names %s, which is no Format.", entry.name, entry.value)


def _guarded(format: Format) -> Format:
    """A format of another package whose faults are sentences: a file that it fails on is refused, and no more."""

    def fault(error: Exception) -> str:
        return f"The format {format.name}, of another package, failed: {type(error).__name__}: {str(error)[:200]}"

    def detect(values: Sequence[Any]) -> bool:
        try:
            return bool(format.detect(values))
        except Exception as error:  # this file may be of any other format
            _log.warning(fault(error))
            return False

    def read(source: Source) -> Iterator[Trajectory | Rejected]:
        try:
            for item in format.read(source):
                if not isinstance(item, Trajectory | Rejected):
                    raise TypeError(f"it yields {type(item).__name__}, which is no Trajectory and no Rejected")
                yield item
        except Refusal:
            raise
        except Exception as error:
            raise FileRefused(fault(error)) from error

    def cut(source: Source, size: int) -> list[FilePart]:
        try:
            return format.cut(source, size) if format.cut else []
        except Exception as error:  # the whole file is read in one
            _log.warning(fault(error))
            return []

    return replace(format, detect=detect, read=read, cut=format.cut and cut)


def join_lines(parts: Iterable[IO[bytes]], file: IO[bytes]) -> None:
    """Files of lines one after the other."""
    for part in parts:
        shutil.copyfileobj(part, file, 1 << 20)


class SeenIds:
    """The ids that came before, as hashes of 8 bytes, because a file may hold millions of ids."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, dtype=np.int64)
        self._newest: set[int] = set()

    def __contains__(self, name: str) -> bool:
        key = hash(name)
        place = int(self._sorted.searchsorted(key))
        return key in self._newest or (place < len(self._sorted) and int(self._sorted[place]) == key)

    def add(self, name: str) -> None:
        self._newest.add(hash(name))
        if len(self._newest) >= max(4096, len(self._sorted) // 16):
            newest = np.fromiter(self._newest, np.int64, len(self._newest))
            self._sorted = np.sort(np.concatenate([self._sorted, newest]))
            self._newest.clear()


def each_batch(
    source: Source, read_batch: Callable[[Any, int], Sequence[Trajectory]], decode: Callable[[bytes], Any] = decode,
) -> Iterator[Trajectory | Rejected]:
    """The trajectories of each line. A line is rejected whole if it cannot be read, or if it came before. Another
    trajectory of an id that came before gets its line behind the id."""
    seen_ids = SeenIds()
    for line in source.lines():
        try:
            data = line.checked()
            with shapes.noting() as notes:
                items = read_batch(decode(data), line.number)
            digest = sha256(data).hexdigest()
            keys = {f"{digest} {item.external_id}" for item in items}
            is_repeated = any(key in seen_ids for key in keys)
            if not is_repeated:
                items = [
                    replace(item, external_id=f"{item.external_id[:180]}-line-{line.number}")
                    if item.external_id in seen_ids else item for item in items
                ]
            for item in items:
                if item.external_id in seen_ids:
                    raise BadLine(f"The id {item.external_id!r} was used on an earlier line of this file.")
        except BadLine as error:
            yield Rejected(line.number, str(error))
            continue
        for key in keys:
            seen_ids.add(key)
        for item in items:
            seen_ids.add(item.external_id)
            limits.current().count(item)
            yield replace(item, extra=shapes.with_notes(item.extra, notes)) if notes else item


def each_line(
    source: Source, read_line: Callable[[Any, int], Trajectory], decode: Callable[[bytes], Any] = decode,
) -> Iterator[Trajectory | Rejected]:
    """One trajectory a line; a line that cannot be read, or whose id came before, is rejected."""
    return each_batch(source, lambda value, number: (read_line(value, number),), decode)


def line_format(
    name: str, title: str, detect: Detect, read_line: Callable[[Any, int], Trajectory], lacks: str = ""
) -> Format:
    """A format whose files hold one trajectory a line."""
    return batch_format(name, title, detect, lambda value, number: (read_line(value, number),), lacks)


def batch_format(
    name: str, title: str, detect: Detect, read_batch: Callable[[Any, int], Sequence[Trajectory]], lacks: str = ""
) -> Format:
    """A format whose files hold some trajectories a line."""
    return Format(name, title, detect, partial(each_batch, read_batch=read_batch), lacks, cut=parts_of)


def having(*keys: str, **types: type) -> Detect:
    """Recognises a file whose first value is an object with all of these keys, those of ``types`` with such values."""
    return lambda values: has_keys(values[0], *keys, *types) and all(
        isinstance(values[0][key], kind) for key, kind in types.items()
    )


def has_keys(value: Any, *keys: str) -> bool:
    """Whether a value is an object with all of these keys."""
    return isinstance(value, dict) and all(key in value for key in keys)
