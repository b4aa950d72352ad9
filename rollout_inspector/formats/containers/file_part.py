"""A part of a file, read as a file."""

from __future__ import annotations

import io
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.formats.containers.compression import Kind, unpacking

SessionLines = tuple[tuple[tuple[int, int, int], ...], NDArray[np.bool_], NDArray[np.bool_]]
"""The lines of some sessions, which may lie between lines of others. Stretches of the file that are read: first byte,
number of the first line, lines. ``[lines of all stretches]``: the line belongs to one of the sessions. ``[these
lines]``: the line is the last one of its session."""


@dataclass(frozen=True)
class FilePart:
    """A part of a file: whole lines, row groups of Parquet, or the lines of some sessions."""

    start: int  # Byte of the file at which it begins.
    size: int  # Bytes of the file.
    line: int  # Number of its first line or row.
    groups: range | None = None  # Row groups of Parquet.
    sessions: SessionLines | None = field(default=None, compare=False)  # Lines of sessions; ``size`` counts them alone.
    packed: tuple[Kind, int, int] | None = None
    """Lines of a packed file: its kind, unpacked bytes from the beginning of the part's frame to the first line, and
    unpacked bytes of the lines. Then ``start`` and ``size`` are packed bytes."""

    def to_json(self) -> dict[str, Any]:
        """The part as a value of JSON."""
        fields: dict[str, Any] = {"part": [self.start, self.size, self.line]}
        if self.groups is not None:
            fields["groups"] = [self.groups.start, self.groups.stop]
        if self.sessions is not None:
            spans, own, last = self.sessions
            fields["sessions"] = [spans, _packed(own), _packed(last)]
        if self.packed is not None:
            fields["packed"] = list(self.packed)
        return fields

    @classmethod
    def of_json(cls, value: Any) -> FilePart | None:
        """The part that :meth:`to_json` wrote, which may stand among other keys; None = none."""
        if "part" not in value:
            return None
        groups, sessions = value.get("groups"), None
        if session_lines := value.get("sessions"):
            spans = tuple((start, line, n) for start, line, n in session_lines[0])
            own = _unpacked(session_lines[1], sum(n for *_, n in spans))
            sessions = spans, own, _unpacked(session_lines[2], int(own.sum()))
        start, size, line = value["part"]
        packed = tuple(value["packed"]) if "packed" in value else None
        return cls(start, size, line, None if groups is None else range(*groups), sessions, packed)


def _packed(mask: NDArray[np.bool_]) -> str:
    return b64encode(zlib.compress(np.packbits(mask).tobytes())).decode()


def _unpacked(text: str, n: int) -> NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(zlib.decompress(b64decode(text)), np.uint8), count=n).astype(np.bool_)


class Slice(io.RawIOBase):
    """The bytes of a part as a file. It owns the whole file and closes it."""

    def __init__(self, raw: BinaryIO, part: FilePart) -> None:
        raw.seek(part.start)
        self._file, self._at, self._stream, self._size = raw, 0, raw, part.size
        if part.packed is not None:
            kind, to_skip, self._size = part.packed
            self._stream = unpacking(raw, kind)
            while to_skip and (data := self._stream.read(min(to_skip, 1 << 20))):
                to_skip -= len(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(min(len(buffer), self._size - self._at))
        self._at += len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
