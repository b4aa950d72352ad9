"""The files of a folder that a trainer wrote, in the order of their training steps."""

import contextlib
import os
import re
from pathlib import Path

from rollout_inspector.formats.containers.refusals import FileRefused

READ = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")
"""Endings of the names of files that are taken out of a folder."""
MANIFEST = ".manifest.json"  # Ends the name of what `rollout-inspector mend` tells of the file beside it.
MAX_FILES = 20_000
_TRACES = re.compile(r"(\d{5}|traces)\.jsonl(\.zst|\.gz)?")  # Files of traces of prime-rl.


def files_of(path: Path, most: int = MAX_FILES) -> list[Path]:
    """The path itself, or the files in a folder and its folders, ``step_9`` before ``step_10``. Hidden files, links and
    files of other endings are left out, and so are files that are read together with another one. Raises
    :class:`FileRefused` for a folder without files, and for one with too many."""
    if not path.is_dir():
        return [path]
    files: list[Path] = []
    for folder, folders, names in os.walk(path):
        others = _read_with_others(Path(folder), folders, names)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in others]
        names = [name for name in names if name not in others]
        for name in names:
            entry = Path(folder, name)
            if not name.startswith(".") and name.lower().endswith(READ) and not entry.is_symlink():
                files.append(entry)
        if len(files) > most:
            raise FileRefused(f"{path} holds more than {most:,} files. Import its folders one after the other.")
    if not files:
        raise FileRefused(f"{path} holds no files that end in {', '.join(READ)}.")
    return sorted(files, key=lambda one: _in_order(one.relative_to(path)))


def _read_with_others(folder: Path, folders: list[str], names: list[str]) -> set[str]:
    """The names in a folder whose content is read together with that of another, or only repeats it."""
    others = {name for name in names if name.endswith(MANIFEST) and name.removesuffix(MANIFEST) in names}
    if "dashboard_columns" in folders:  # miles: conversations beside the columns, and telemetry
        others |= {"trajectory", "dashboard"}
    has_traces = any(map(_TRACES.fullmatch, names))
    if "annotations" in folders and (has_traces or any(_holds_traces(folder / name) for name in folders)):
        others |= {"annotations", "live"}  # prime-rl: what a trainer adds to traces, and episodes that have not ended
        has_traces = True
    if has_traces:
        others |= {name for name in names if name.endswith("index.jsonl")}
    return others


def _holds_traces(folder: Path) -> bool:
    """Whether a folder beside ``annotations/`` is a stream of prime-rl."""
    if folder.name == "annotations" or folder.is_symlink():
        return False
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return any(_TRACES.fullmatch(entry.name) for entry in entries)
    return False


def _in_order(path: Path) -> list[list[tuple[int, str]]]:
    """Sorts the numbers in a path as numbers."""
    return [
        [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d{1,15})", name)] for name in path.parts
    ]
