"""Packed files: gzip and zstd, one frame behind the other."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal, NamedTuple

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)))
"""The first bytes of gzip, of zstd, and of a frame of zstd that is skipped, as pzstd writes it in front."""
DAMAGE = (zlib.error, gzip.BadGzipFile, EOFError, zstd.ZstdError, OSError)  # What reading a damaged file raises.
Kind = Literal["gzip", "zstd"]
_ZSTD = {int(zstd.DecompressionParameter.window_log_max): 27}  # A frame may ask for 128 MB.
_BITE = 2048  # Bytes that are unpacked at once: one byte of a bomb can stand for 30 kB.


class Unpacked(NamedTuple):
    """Some of the bytes of a packed file."""

    frame: int  # The byte of the file at which their frame begins; a frame of gzip is called a member.
    stop: int  # The byte of the file behind those that it was made of.
    data: bytes  # Unpacked.


def pieces(raw: BinaryIO, kind: Kind) -> Iterator[Unpacked]:
    """All bytes from the next frame on. Raises one of ``DAMAGE``."""
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
                inside = zlib.decompressobj(31) if kind == "gzip" else zstd.ZstdDecompressor(options=_ZSTD)
            unpacked = inside.decompress(data)
            yield Unpacked(start, stop - len(inside.unused_data), unpacked)
            if not inside.eof:
                break
            data, inside = inside.unused_data, None
    if inside is not None:
        raise EOFError("the last frame has no end")


def unpacking(raw: BinaryIO, kind: Kind) -> Any:
    """A stream of all bytes from the next frame on. Its caller closes the file."""
    return gzip.GzipFile(fileobj=raw) if kind == "gzip" else zstd.ZstdFile(raw, options=_ZSTD)
