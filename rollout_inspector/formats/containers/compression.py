"""Packed files: gzip and zstd, one frame behind the other."""

import gzip
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

import zstandard

PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
"""The first bytes of gzip, of zstd, and of a frame of zstd that is skipped, as pzstd writes it in front."""
DAMAGE = (zlib.error, gzip.BadGzipFile, EOFError, zstandard.ZstdError, OSError)  # What reading a damaged file raises.
Kind = Literal["gzip", "zstd"]
_BITE = 2048  # Bytes that are unpacked at once: one byte of a bomb can stand for 30 kB.


class Unpacked(NamedTuple):
    """Some of the bytes of a packed file."""

    frame: int  # The byte of the file at which their frame begins; a frame of gzip is called a member.
    stop: int  # The byte of the file behind those that it was made of.
    data: bytes  # Unpacked.


def pieces(raw: BinaryIO, kind: Kind) -> Iterator[Unpacked]:
    """All bytes from the next frame on. Raises one of ``DAMAGE``."""
    zstd = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    inside: Any = None
    start, stop = 0, raw.tell()
    while data := raw.read(_BITE):
        stop += len(data)
        while data:
            if inside is None:
                data = data.lstrip(b"\0") if kind == "gzip" else data  # what fills a block of a tape
                if not data:
                    break
                start = stop - len(data)
                inside = zlib.decompressobj(31) if kind == "gzip" else zstd.decompressobj()
            unpacked = inside.decompress(data)
            yield Unpacked(start, stop - len(inside.unused_data), unpacked)
            if not inside.eof:
                break
            data, inside = inside.unused_data, None
    if inside is not None:
        raise EOFError("the last frame has no end")


def unpacking(raw: BinaryIO, kind: Kind) -> Any:
    """A stream of all bytes from the next frame on. It owns the file and closes it."""
    return gzip.GzipFile(fileobj=raw) if kind == "gzip" else _Zstd(raw)


class _Zstd:
    """Reads zstd frames one after the other. Unlike the library's reader it notices a file that was cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._pieces = raw, pieces(raw, "zstd")
        self._held = b""
        self._offset = 0

    def read(self, n: int) -> bytes:
        while self._offset == len(self._held):
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._offset, self._held = 0, piece.data
        data = self._held[self._offset : self._offset + n]
        self._offset += len(data)
        return data

    def close(self) -> None:
        self._raw.close()
