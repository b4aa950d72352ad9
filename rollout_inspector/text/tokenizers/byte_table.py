"""The bytes of every token id of one tokenizer. The bytes of a stream, joined, are exactly the bytes that the encoder
read. A token that holds half a character keeps its half. It needs numpy and the standard library alone."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class ByteTable:
    """The bytes of every token of one tokenizer. ``special`` ``[vocab_size]`` is True for control tokens."""

    def __init__(self, offsets: NDArray[np.uint32], data: bytes | mmap.mmap, special: NDArray[np.bool_], kind: str):
        self.vocab_size = len(offsets) - 1
        self.special = special
        self.kind = kind  # ``byte_level``, ``metaspace``, ``wordpiece`` or ``decoded``: how the bytes were found.
        self._offsets = offsets
        self._data = data
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def token_bytes(self, ids: NDArray[np.int32] | Sequence[int]) -> list[bytes]:
        """The bytes of each id; ``b""`` for an id outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        is_known = (array >= 0) & (array < self.vocab_size)
        safe = np.where(is_known, array, 0)
        starts = self._offsets[safe]
        stops = np.where(is_known, self._offsets[safe + 1], starts)
        data = self._data
        return [data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def joined(self, ids: NDArray[np.int32] | Sequence[int]) -> tuple[bytes, NDArray[np.int64]]:
        """The bytes of a stream, and for each of its ids ``[n]`` where its bytes end. Makes no object per token."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if not len(array):
            return b"", array
        is_known = None
        if array.view(np.uint64).max() >= self.vocab_size:  # as unsigned, a negative id is a huge one
            is_known = (array >= 0) & (array < self.vocab_size)
            array = np.where(is_known, array, 0)
        starts = self._offsets.take(array).astype(np.int64)
        lengths = self._offsets.take(array + 1) - starts
        if is_known is not None:
            lengths *= is_known
        ends = lengths.cumsum()
        places = (starts - ends + lengths).repeat(lengths)
        places += np.arange(len(places))
        return self._bytes.take(places).tobytes(), ends

    def join(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes of a stream."""
        return self.joined(ids)[0]

    def text(self, ids: NDArray[np.int32] | Sequence[int]) -> str:
        """The stream as text; bytes that are not UTF-8 become U+FFFD."""
        return self.join(ids).decode("utf-8", "replace")

    def arrays(self) -> tuple[NDArray[np.uint32], bytes | mmap.mmap, NDArray[np.bool_]]:
        """Offsets ``[V+1]``, all bytes, and ``special`` ``[V]``: what the table was made of."""
        return self._offsets, self._data, self.special


def special_tokens(table: ByteTable | None, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """``[n]``: which of ``ids`` ``[n]`` are control tokens. All False without a tokenizer."""
    if table is None:
        return np.zeros(len(ids), dtype=np.bool_)
    is_known = (ids >= 0) & (ids < len(table.special))
    return np.asarray(table.special)[np.where(is_known, ids, 0)].astype(np.bool_) & is_known


FORMAT = 2  # Part of the name of a table's folder. Raise it when the content of a table changes.
TABLE_FILES = ("offsets.npy", "special.npy", "bytes.bin", "meta.json")
"""The files of a table, in the order in which they are stored: where the last one is, the table is whole."""


def write_table(table: ByteTable, folder: Path) -> None:
    """Write a table into a folder that exists."""
    offsets, data, special = table.arrays()
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "special.npy", special)
    # An empty file cannot be mapped, so an empty table still has one byte.
    (folder / "bytes.bin").write_bytes(data or b"\0")
    (folder / "meta.json").write_text(json.dumps({"format": FORMAT, "kind": table.kind}))


def open_table(folder: Path) -> ByteTable:
    """A table that was written before. Needs numpy and the standard library alone."""
    # A plain view of the mapping, because indexing the ``memmap`` class is slow.
    offsets = np.load(folder / "offsets.npy", mmap_mode="r").view(np.ndarray)
    special = np.load(folder / "special.npy")
    kind = json.loads((folder / "meta.json").read_text())["kind"]
    with (folder / "bytes.bin").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return ByteTable(offsets, data, special, kind)
