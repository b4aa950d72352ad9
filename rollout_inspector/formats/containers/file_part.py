"""A part of a file, read as a file."""

from __future__ import annotations

import io
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.formats.containers.packed import Kind, unpacking


@dataclass(frozen=True, eq=False)
class SessionLines:
    """The lines of some sessions, which may lie between lines of others."""

    spans: tuple[tuple[int, int, int], ...]
    """Stretches of the file that are read: first byte, number of the first line, lines. What lies between is not."""
    own: NDArray[np.bool_]
    """``[lines of all spans]``: the line belongs to one of the sessions."""
    last: NDArray[np.bool_]
    """``[own lines]``: the line is the last one of its session."""


@dataclass(frozen=True)
class PackedLines:
    """Whole lines of a packed file."""

    kind: Kind
    skip: int
    """Unpacked bytes between the beginning of a frame, which is that of the part, and the first line."""
    n: int
    """Unpacked bytes of the lines."""


@dataclass(frozen=True)
class FilePart:
    """A part of a file: whole lines, row groups of Parquet, or the lines of some sessions."""

    start: int
    """Byte of the file at which it begins."""
    size: int
    """Bytes of the file."""
    line: int
    """Number of its first line or row."""
    groups: range | None = None
    """Row groups of Parquet."""
    sessions: SessionLines | None = field(default=None, compare=False)
    """Lines of sessions; ``size`` counts them alone."""
    packed: PackedLines | None = None
    """Lines of a packed file; ``start`` and ``size`` are packed bytes."""

    def to_json(self) -> dict[str, Any]:
        """The part as a value of JSON."""
        found: dict[str, Any] = {"part": [self.start, self.size, self.line]}
        if self.groups is not None:
            found["groups"] = [self.groups.start, self.groups.stop]
        if self.sessions is not None:
            found["sessions"] = [self.sessions.spans, _packed(self.sessions.own), _packed(self.sessions.last)]
        if self.packed is not None:
            found["packed"] = [self.packed.kind, self.packed.skip, self.packed.n]
        return found

    @classmethod
    def of_json(cls, value: Any) -> FilePart | None:
        """The part that :meth:`to_json` wrote, which may stand among other keys; None = none."""
        if "part" not in value:
            return None
        groups, sessions = value.get("groups"), None
        if held := value.get("sessions"):
            spans = tuple((start, line, n) for start, line, n in held[0])
            own = _unpacked(held[1], sum(n for *_, n in spans))
            sessions = SessionLines(spans, own, _unpacked(held[2], int(own.sum())))
        start, size, line = value["part"]
        packed = PackedLines(*value["packed"]) if "packed" in value else None
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
            self._stream, self._size = unpacking(raw, part.packed.kind), part.packed.n
            left = part.packed.skip
            while left and (data := self._stream.read(min(left, 1 << 20))):
                left -= len(data)

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
