"""A message between this process and that of a tokenizer: a small JSON object, and arrays as raw bytes behind it."""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids

Buffer = bytes | memoryview
Message = tuple[dict[str, Any], list[memoryview]]


def pack(head: Mapping[str, Any], *buffers: Buffer) -> bytes:
    """One frame: the head's length (4 bytes, little-endian), the head with the buffers' sizes, the buffers."""
    text = json.dumps({**head, "sizes": [len(buffer) for buffer in buffers]}).encode()
    return b"".join([struct.pack("<I", len(text)), text, *buffers])


def unpack(frame: bytes) -> Message:
    """The head and the buffers of a frame. Raises ``ValueError`` for one that :func:`pack` did not write."""
    if len(frame) < 4:
        raise ValueError("a frame without a head")
    start = 4 + struct.unpack_from("<I", frame)[0]
    head, view, buffers = json.loads(frame[4:start]), memoryview(frame), []
    for size in head["sizes"]:
        buffers.append(view[start : start + size])
        start += size
    if start != len(frame):
        raise ValueError("a frame whose sizes are wrong")
    return head, buffers


def pack_texts(texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Lengths in bytes (int32), and the texts joined, UTF-8. A lone surrogate, which has no bytes, becomes ``?``."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    return ints(list(map(len, encoded))), b"".join(encoded)


def unpack_texts(lengths: Buffer, joined: Buffer) -> list[str]:
    """What :func:`pack_texts` packed."""
    stops = np.cumsum(as_ints(lengths)).tolist()
    return [str(joined[a:b], "utf-8") for a, b in zip([0, *stops], stops, strict=False)]


def pack_arrays(arrays: Sequence[Ids]) -> tuple[bytes, bytes]:
    """Lengths (int32), and the arrays joined, int32."""
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    return ints([len(array) for array in arrays]), joined.astype("<i4", copy=False).tobytes()


def unpack_arrays(lengths: Buffer, joined: Buffer) -> list[Ids]:
    """What :func:`pack_arrays` packed. The arrays share one buffer, which nobody else has."""
    ids, stops = as_ints(joined), np.cumsum(as_ints(lengths)).tolist()
    return [ids[a:b] for a, b in zip([0, *stops], stops, strict=False)]


def ints(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Whole numbers as int32, little-endian."""
    return np.asarray(values, dtype="<i4").tobytes()


def as_ints(buffer: Buffer) -> Ids:
    """A new array of the int32 numbers of a buffer."""
    return np.frombuffer(buffer, dtype="<i4").astype(np.int32)
