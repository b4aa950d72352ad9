"""Where the lines of a plain file lie, found without decoding them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

_BLANK = re.compile(rb"[\0\s]*")
_PIECE_BYTES = 4 << 20


class LinePlace(NamedTuple):
    """One line that is not blank."""

    start: int
    """Its first byte."""
    size: int
    """Bytes up to its end, without the line end."""
    number: int
    """1-based."""
    stop: int
    """The byte from which the next line is looked for."""
    is_ended: bool = True
    """False: the file ends in it, so that it may still be written."""


def line_places(raw: BinaryIO, start: int, number: int, size: int) -> Iterator[LinePlace]:
    """The lines from byte ``start`` on. Holes of a sparse file are jumped over, and end lines.

    ``number``: of the first line. ``size``: bytes of the file, behind which nothing is read.
    """
    begin: int | None = None
    for low, high in _extents(raw, start, size):
        raw.seek(low)
        while low < high and (piece := raw.read(min(_PIECE_BYTES, high - low))):
            ends, first = np.flatnonzero(np.frombuffer(piece, np.uint8) == 10).tolist(), 0
            for end in [*ends, len(piece)]:
                if begin is None and (blank := _BLANK.match(piece, first, end)) and blank.end() < end:
                    begin = low + blank.end()
                if end < len(piece):
                    if begin is not None:
                        yield LinePlace(begin, low + end - begin, number, low + end + 1)
                    begin, number, first = None, number + 1, end + 1
            low += len(piece)
        if begin is not None:
            stop = low - len(piece) + len(piece.rstrip(b"\0")) if piece else low
            yield LinePlace(begin, stop - begin, number, low, is_ended=low < size)
            begin = None


def _extents(raw: BinaryIO, start: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data; one where the file system does not tell."""
    while start < size:
        try:
            low = os.lseek(raw.fileno(), start, os.SEEK_DATA)
            high = os.lseek(raw.fileno(), low, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
            low, high = start, size
        yield low, min(high, size)
        start = high
