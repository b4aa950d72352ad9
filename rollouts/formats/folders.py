"""The files of a folder that a trainer wrote, in the order of their training steps."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollouts.formats.containers.refused import FileRefused

READ = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")
"""Endings of the names of files that are taken out of a folder."""
MAX_FILES = 20_000


def files_of(path: Path) -> list[Path]:
    """The path itself, or the files in a folder and its folders, ``step_9`` before ``step_10``.

    Hidden files, links and files of other endings are left out. Raises :class:`FileRefused` for a folder without files,
    and for one with too many.
    """
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            one = Path(folder, name)
            if not name.startswith(".") and name.lower().endswith(READ) and not one.is_symlink():
                found.append(one)
        if len(found) > MAX_FILES:
            raise FileRefused(f"{path} holds more than {MAX_FILES:,} files. Import its folders one after the other.")
    if not found:
        raise FileRefused(f"{path} holds no files that end in {', '.join(READ)}.")
    return sorted(found, key=lambda one: _in_order(one.relative_to(path)))


def _in_order(path: Path) -> list[list[tuple[int, str]]]:
    """Sorts the numbers in a path as numbers."""
    return [
        [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d{1,15})", name)] for name in path.parts
    ]
