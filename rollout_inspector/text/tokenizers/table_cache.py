"""Byte tables on disk: written once from a tokenizer, then memory-mapped. Pages read them and need no tokenizer."""

import json
import mmap
from pathlib import Path

import numpy as np

from rollout_inspector.text.tokenizers.byte_table import ByteTable

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
