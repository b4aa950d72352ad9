"""Cuts a file that is one JSON array, or JSON objects over several lines each, without holding the file. Each element
is then read like a line. docs/decisions/0016-json-arrays.md says why no library does this."""

import re
from collections.abc import Iterable, Iterator

ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|$)")
"""How such a file begins: an array of objects, the first of them perhaps on the next line."""
# Outside a string only these bytes matter, and commas only between elements. Inside a string the quote that ends it
# and the backslash that hides a quote matter.
_DEEP = re.compile(rb'["\[\]{}]')
_TOP = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')


def elements(pieces: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The bytes of each element of an array, None for an element longer than ``limit`` bytes. ``pieces`` may be cut
    anywhere. An element without an end, and what follows the array, come as they are."""
    buffer = _Held(limit)
    depth, start, count, ended = 0, 0, 0, False
    for piece, at, byte, depth in _marks(pieces):
        if not byte:
            buffer.add(piece[start:])
            start = 0
        elif ended:
            continue
        elif depth == 0 and byte in b"]}":
            ended = True
            last = buffer.take(piece[start:at])
            if last is None or last or count:
                yield last
            start = at + 1
        elif byte == 0x2C:
            yield buffer.take(piece[start:at])
            count += 1
            start = at + 1
        elif byte == 0x5B:
            start = at + 1
    remainder = buffer.take(b"")
    if remainder or remainder is None or (depth == 1 and count):
        yield remainder


def objects(pieces: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """The bytes of each object at the top of a file, None for an object longer than ``limit`` bytes. ``pieces`` may be
    cut anywhere. What is no object comes with the object behind it, or at the end."""
    buffer = _Held(limit)
    start = 0
    for piece, at, byte, depth in _marks(pieces):
        if not byte:
            buffer.add(piece[start:])
            start = 0
        elif depth == 0 and byte in b"]}":
            yield buffer.take(piece[start : at + 1])
            start = at + 1
    remainder = buffer.take(b"")
    if remainder or remainder is None:
        yield remainder


class _Held:
    """The bytes of an element that has no end yet, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = bytearray()
        self._is_too_long = False

    def add(self, data: bytes) -> None:
        self._bytes += data
        if len(self._bytes) > self._limit:
            self._is_too_long = True
            self._bytes.clear()

    def take(self, data: bytes) -> bytes | None:
        """Everything held with ``data`` at its end; None when that is too long. Holds nothing afterwards."""
        self.add(data)
        whole = None if self._is_too_long else bytes(self._bytes).strip()
        self._bytes.clear()
        self._is_too_long = False
        return whole


def _marks(pieces: Iterable[bytes]) -> Iterator[tuple[bytes, int, int, int]]:
    """Piece, position, byte and depth of each bracket outside strings that leaves a depth of 0 or 1. The same for each
    comma at these depths. The end of each piece comes as byte 0."""
    depth, in_string, skip = 0, False, False
    for piece in filter(None, pieces):
        at, skip = int(skip), False  # the backslash was the last byte of the piece before
        while match := (_INSIDE if in_string else _DEEP if depth > 1 else _TOP).search(piece, at):
            byte, at = piece[match.start()], match.end()
            if byte == 0x22:
                in_string = not in_string
            elif byte == 0x5C:
                at += 1
                skip = at > len(piece)
            else:
                if byte in b"[{":
                    depth += 1
                elif byte in b"]}":
                    depth = max(depth - 1, 0)
                if depth <= 1:
                    yield piece, match.start(), byte, depth
        yield piece, len(piece), 0, depth
