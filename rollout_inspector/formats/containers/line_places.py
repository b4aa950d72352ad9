"""Where the lines of a plain file lie, found without decoding them."""

import os
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

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
