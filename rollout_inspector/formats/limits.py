"""What a file may become while it is read: all limits, and the only place that counts.

A small body can become large, or slow to read: packed bytes, a line of many short values, steps that repeat a long
prompt, a batch with one large field. A line beyond a limit is rejected, a file is refused, and the sentence names the
number. Readers ask :func:`current`, so a push is read under other limits than a file.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout_inspector.formats.containers.refusals import BadLine, TooLarge
from rollout_inspector.streams.trajectory import Trajectory


@dataclass(frozen=True)
class Limits:
    """The limits of one reading. Every number is the largest that is read."""

    line_bytes: int = 128 << 20
    """Of one line, or of one element of an array. 200 turns that repeat a prompt of 100k tokens fit."""
    line_memory: int = 1536 << 20
    """Bytes of memory that the JSON values of one line take, as :func:`memory_of` estimates. 25 million ids fit."""
    line_ids: int = 100_000_000
    """Token ids of the steps of one line or session, each step's prompt written out: 400 MB."""
    line_messages: int = 2_000_000  # Messages of one line, each step's request written out.
    line_items: int = 200_000  # Steps, nodes or trajectories of one line.
    line_repeated_bytes: int = 256 << 20
    """JSON text of the fields of a line that are stored with each of its trajectories or steps."""
    blank_lines: int = 1_000_000  # Blank lines in a row. Packed they are nothing, and reading them takes minutes.
    ratio: int = 200  # How many times a packed file grows. Lists of ids grow 3 to 30 times.
    parquet_ratio: int = 2000  # The same of a Parquet file: one stored prompt may stand in every row of a group.
    free_bytes: int = 64 << 20  # Unpacked bytes below which no ratio counts.
    parquet_group_bytes: int = 4 << 30
    """Unpacked bytes of one row group of a Parquet file. One row group is in memory at once."""
    parquet_footer_bytes: int = 32 << 20
    """Of what a Parquet file says about its row groups and columns. 10,000 groups of 30 columns take 18 MB."""
    parquet_memory: int = 4 << 30
    """Bytes of memory that reading a Parquet file takes beyond what the process holds (Linux)."""
    rejected: int | None = None  # Rejected lines of the whole file. None = no limit.
    ids: int | None = None  # Token ids of the whole file, each step's prompt written out. None = no limit.
    seconds: float | None = None
    """Processor seconds of reading and storing the whole file. None = no limit: an import can be cancelled."""


IMPORT = Limits()
PUSH = Limits(
    line_bytes=64 << 20, line_memory=768 << 20, line_ids=25_000_000, line_items=50_000,
    line_repeated_bytes=64 << 20, parquet_group_bytes=512 << 20, rejected=10_000, ids=250_000_000,
    seconds=60.0,
)
"""Somebody waits for the answer to a push. What is larger can be imported as a file."""
BY_IMPORT = "Push it in smaller parts, or import it as a file."


class Reading:
    """One reading of a file: what it has used, and what is beyond its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._n_ids = 0
        self._began = time.process_time()

    def go_on(self) -> None:
        """Raises :class:`TooLarge` when the time is used up."""
        seconds = self.limits.seconds
        if seconds is not None and time.process_time() - self._began > seconds:
            raise TooLarge(f"Reading took more than {seconds:g} seconds of computing. {BY_IMPORT}")

    def count(self, trajectory: Trajectory) -> None:
        """Count a trajectory that was read. Raises :class:`TooLarge`."""
        self.go_on()
        most = self.limits.ids
        if most is None:
            return
        self._n_ids += trajectory.n_ids
        if self._n_ids > most:
            raise TooLarge(f"With each step's prompt written out there are more than {most:,} token ids. {BY_IMPORT}")

    def check_rejected(self, n: int) -> None:
        """``n``: rejected lines of the file so far. Raises :class:`TooLarge`."""
        most = self.limits.rejected
        if most is not None and n > most:
            raise TooLarge(f"More than {most:,} lines were rejected, so the rest was not read. The first say why.")

    def check_line(self, data: bytes) -> str:
        """Why a line is not decoded, as a sentence; empty = it may be."""
        n, most = len(data), self.limits.line_memory
        if n > self.limits.line_bytes:
            return self.too_long()
        if n * _MEMORY_RATIO <= most or (memory := memory_of(data)) <= most:
            return ""
        return (
            f"The line would take {memory >> 20:,} MB of memory, because it holds many short values; at most "
            f"{most >> 20:,} MB are read. Leave out fields that are not needed."
        )

    def too_long(self) -> str:
        """The sentence for a line that is too long to be read."""
        return f"The line is longer than {self.limits.line_bytes >> 20} MB. Leave out fields that are not needed."

    def check_blank(self, name: str, n: int) -> None:
        """``n``: blank lines in a row. Raises :class:`TooLarge`."""
        if n > self.limits.blank_lines:
            raise TooLarge(f"{name} holds more than {self.limits.blank_lines:,} blank lines in a row.")

    def check_growth(self, name: str, n: int, packed: int) -> None:
        """``n``: bytes that were unpacked from so many. Raises :class:`TooLarge`."""
        ratio = self.limits.ratio
        if n > self.limits.free_bytes and n > ratio * max(packed, 1):
            raise TooLarge(
                f"{name} grows more than {ratio} times when it is unpacked; it looks like a zip bomb. "
                "If it is not, unpack it yourself and import the plain file."
            )

    def check_parquet_growth(self, name: str, n: int, size: int) -> None:
        """``n``: bytes of the rows so far as JSON text, of a file of so many bytes. Raises :class:`TooLarge`."""
        ratio = self.limits.parquet_ratio
        if n > self.limits.free_bytes and n > ratio * size:
            raise TooLarge(
                f"{name} grows more than {ratio:,} times when it is read; it looks like a zip bomb. "
                "If it is not, write it again as JSON Lines."
            )

    def check_parquet_group(self, name: str, n: int) -> None:
        """``n``: unpacked bytes of a row group, as the file says. Raises :class:`TooLarge`."""
        if n > self.limits.parquet_group_bytes:
            raise TooLarge(
                f"{name} has a row group of {n >> 20:,} MB; at most {self.limits.parquet_group_bytes >> 20:,} MB are "
                "read at once. Write it again with smaller row groups."
            )

    def check_repeated(self, fields: Any, n: int, what: str) -> None:
        """Check fields that ``n`` parts of a line share, because each part is stored with them. Raises `BadLine`."""
        if n > self.limits.line_items:
            raise BadLine(f"The line holds {n:,} {what}; at most {self.limits.line_items:,} are read of one line.")
        size = len(msgspec.json.encode(fields)) if n > 1 and fields else 0
        if n * size > self.limits.line_repeated_bytes:
            raise BadLine(
                f"The fields that all {n:,} {what} share would be stored {n:,} times, {n * size >> 20:,} MB in all; at "
                f"most {self.limits.line_repeated_bytes >> 20:,} MB are. Leave out fields that are not needed."
            )


class Decoded:
    """Counts what the steps of one line, or of one session, hold when each prompt and request is written out."""

    def __init__(self) -> None:
        self._limits = current().limits
        self._n_ids = self._n_messages = self._n_items = 0

    def add(self, where: str, ids: int, messages: int = 0) -> None:
        """Count a step. ``where`` names it. Raises :class:`BadLine`."""
        limits = self._limits
        self._n_ids += ids
        self._n_messages += messages
        self._n_items += 1
        if (
            self._n_ids > limits.line_ids
            or self._n_messages > limits.line_messages
            or self._n_items > limits.line_items
        ):
            raise BadLine(
                f"Up to {where} there are {self._n_items:,} steps, whose prompts hold {self._n_ids:,} ids and "
                f"{self._n_messages:,} messages; at most {limits.line_items:,}, {limits.line_ids:,} and "
                f"{limits.line_messages:,} are read of one trajectory."
            )


_current: ContextVar[Reading] = ContextVar("reading", default=Reading(IMPORT))  # noqa: B039 - it counts nothing


def current() -> Reading:
    """The reading that is under way; without one, the limits of an import."""
    return _current.get()


@contextmanager
def reading(limits: Limits) -> Iterator[Reading]:
    """Everything that is read in this context counts as one reading."""
    token = _current.set(Reading(limits))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


# -- memory of JSON values

_MEMORY_RATIO = 36  # No JSON text takes more bytes of memory for one of its bytes: measured with lists of empty lists.
_PIECE_BYTES = 1 << 20
_LIST, _OBJECT, _VALUE, _QUOTE = 100, 200, 48, 40
"""Bytes that a list, an object, a further value and half a text take in CPython, rounded up."""


def memory_of(line: bytes) -> int:
    """Bytes of memory that the values of a line of JSON take at most."""
    plain = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    counts = dict.fromkeys((b"[", b"{", b","), 0)
    is_text = 0
    for start in range(0, len(plain), _PIECE_BYTES):
        # Every second piece between quotes is a text, and what stands in a text costs nothing more.
        pieces = plain[start : start + _PIECE_BYTES].split(b'"')
        outside = b"".join(pieces[is_text::2])
        is_text = (is_text + len(pieces) - 1) % 2
        for mark in counts:
            counts[mark] += outside.count(mark)
    lists, objects, commas = counts.values()
    return len(line) + lists * _LIST + objects * _OBJECT + commas * _VALUE + plain.count(b'"') * _QUOTE
