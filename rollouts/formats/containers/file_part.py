"""A part of a file, read as a file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True)
class FilePart:
    """A part of a file: whole lines of plain text, or row groups of Parquet."""

    start: int
    """Byte of the file at which it begins."""
    size: int
    """Bytes of the file."""
    line: int
    """Number of its first line or row."""
    groups: range | None = None
    """Row groups; None for plain text."""


class Slice(io.RawIOBase):
    """The bytes of a part as a file. It owns the whole file and closes it."""

    def __init__(self, raw: BinaryIO, part: FilePart) -> None:
        self._file, self._size, self._at = raw, part.size, 0
        raw.seek(part.start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._file.read(min(len(buffer), self._size - self._at))
        self._at += len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
