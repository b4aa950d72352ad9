"""Byte tables on disk: written once from a tokenizer, then memory-mapped. Pages read them and need no tokenizer."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from functools import lru_cache
from pathlib import Path

import numpy as np

from rollouts.tokenizers.byte_table import ByteTable
from rollouts.tokenizers.files import file_marks, tokenizer_folder, whole_folder
from rollouts.tokenizers.loaded import load

FORMAT = 2
"""Part of the name of a table's folder. Raise it when the content of a table changes."""


def byte_table(tokenizer_dir: str | Path, cache_dir: str | Path) -> ByteTable:
    """The table of a tokenizer's folder, built at first use under ``cache_dir`` and memory-mapped from there.

    Raises :class:`~rollouts.tokenizers.files.TokenizerUnusable` when the folder holds no usable tokenizer.
    """
    folder = tokenizer_folder(tokenizer_dir)
    marks = file_marks(folder, ("tokenizer.json", "tokenizer_config.json"))
    return _opened(str(folder.resolve()), str(cache_dir), marks)


@lru_cache(maxsize=32)
def _opened(folder: str, cache_dir: str, marks: tuple[object, ...]) -> ByteTable:
    pointer = _pointer(folder, cache_dir, marks)
    place = Path(cache_dir) / pointer.read_text().strip() if pointer.is_file() else None
    if place is None or not (place / "meta.json").is_file():
        place = _write(load(folder).table, pointer, Path(cache_dir))
    return open_table(place)


def keep_table(tokenizer_dir: Path, table: ByteTable, cache_dir: str | Path) -> None:
    """Write the table of a tokenizer's folder, so that :func:`byte_table` finds it."""
    marks = file_marks(tokenizer_dir, ("tokenizer.json", "tokenizer_config.json"))
    pointer = _pointer(str(tokenizer_dir.resolve()), str(cache_dir), marks)
    if not pointer.is_file():
        _write(table, pointer, Path(cache_dir))


def _pointer(folder: str, cache_dir: str, marks: tuple[object, ...]) -> Path:
    key = hashlib.sha256(repr((FORMAT, folder, marks)).encode()).hexdigest()[:16]
    return Path(cache_dir) / "by-folder" / f"{key}.txt"


def _write(table: ByteTable, pointer: Path, cache_dir: Path) -> Path:
    """Write a table and the file that names its folder. The same table has one folder, whoever uses it."""
    offsets, data, special = table.arrays()
    digest = hashlib.sha256(table.kind.encode())
    for part in (offsets.tobytes(), special.tobytes(), data[:]):
        digest.update(part)
    place = cache_dir / f"{digest.hexdigest()}-{FORMAT}"
    if not (place / "meta.json").is_file():
        with whole_folder(place, "meta.json") as draft:
            np.save(draft / "offsets.npy", offsets)
            np.save(draft / "special.npy", special)
            # An empty file cannot be mapped, so an empty table still has one byte.
            (draft / "bytes.bin").write_bytes(data or b"\0")
            (draft / "meta.json").write_text(json.dumps({"format": FORMAT, "kind": table.kind}))
    pointer.parent.mkdir(parents=True, exist_ok=True)
    scratch = pointer.with_suffix(f".{os.getpid()}")
    scratch.write_text(place.name)
    scratch.replace(pointer)
    return place


def open_table(place: Path) -> ByteTable:
    """A table that was written before. Needs numpy and the standard library alone."""
    # A plain view of the mapping, because indexing the ``memmap`` class is slow.
    offsets = np.load(place / "offsets.npy", mmap_mode="r").view(np.ndarray)
    special = np.load(place / "special.npy")
    kind = json.loads((place / "meta.json").read_text())["kind"]
    with (place / "bytes.bin").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return ByteTable(offsets, data, special, kind)
