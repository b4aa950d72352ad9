"""What a format is, and what readers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from rollouts.formats.containers.source import Source
from rollouts.formats.shapes import BadLine, decode
from rollouts.tito.trajectory import Trajectory

_BY_LINE = re.compile(r"line-\d+(-\d+)*(-row-\d+)?")


def is_named_by_line(trajectory: Trajectory) -> bool:
    """Whether a reader named the trajectory by its line, because the source has no id."""
    return _BY_LINE.fullmatch(trajectory.external_id) is not None


@dataclass(frozen=True)
class Rejected:
    """A line that was not read, with a sentence that says why."""

    line: int | None
    reason: str


Read = Callable[[Source], Iterator[Trajectory | Rejected]]
Write = Callable[[Iterable[Trajectory], IO[bytes]], int]
"""Writes trajectories and returns their number."""


@dataclass(frozen=True)
class Format:
    """A foreign format, or our own."""

    name: str
    title: str
    detect: Callable[[Sequence[Any]], bool]
    """Whether the first values of a file (decoded lines) are of this format."""
    read: Read
    lacks: str = ""
    """What such a file cannot tell, as a sentence; empty = nothing is missing."""
    write: Write | None = None
    suffix: str = ".jsonl"


class SeenIds:
    """The ids that came before, as hashes of 8 bytes: a file may hold millions of ids."""

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


def each_line(
    source: Source,
    read_line: Callable[[Any, int], Trajectory | None],
    id_unique: bool = True,
    decode: Callable[[bytes | None], Any] = decode,
) -> Iterator[Trajectory | Rejected]:
    """One trajectory a line; a line that cannot be read, or whose id came before, is rejected."""
    seen = SeenIds()
    for line in source.lines():
        try:
            trajectory = read_line(decode(line.data), line.number)
        except BadLine as error:
            yield Rejected(line.number, str(error))
            continue
        if trajectory is None:
            continue
        if id_unique and trajectory.external_id in seen:
            yield Rejected(line.number, f"The id {trajectory.external_id!r} was used on an earlier line of this file.")
            continue
        seen.add(trajectory.external_id)
        yield trajectory


def has_keys(value: Any, *keys: str) -> bool:
    """Whether a value is an object with all of these keys."""
    return isinstance(value, dict) and all(key in value for key in keys)
