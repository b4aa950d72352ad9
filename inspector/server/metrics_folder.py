"""The folder in which the processes of one web server count requests; claimed before prometheus_client is imported."""

import fcntl
import io
import itertools
import os
from pathlib import Path
from typing import IO, Any

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder. prometheus_client reads it when it is imported."""


def claim_folder(data: Path) -> tuple[Path, IO[str]]:
    """A folder below the data folder for the counters of one web server, empty, and the file that holds its lock. The
    lock ends with the last process that inherited it. The next server then takes the same folder, so that servers that
    were killed leave no folders behind."""
    for number in itertools.count():
        folder = data / "run" / f"metrics-{number}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(folder / "lock", "a", encoding="utf-8")  # noqa: SIM115  open as long as the folder is held
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        for old in folder.glob("*.db"):
            old.unlink()
        return folder, lock
    raise AssertionError("the numbers do not end")


class _AllocatedFile(io.FileIO):
    """A file that has its bytes when it has its size."""

    def truncate(self, size: int | None = None) -> int:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fileno(), 0, size)
        return super().truncate(size)


def allocate_counters() -> None:
    """Have prometheus_client raise OSError where a counter finds no room. It maps files with holes: the first write
    into a hole of a full disk ends the process by a signal."""
    from prometheus_client import mmap_dict

    add_key = mmap_dict.MmapedDict._init_value

    def add_or_raise(counters: Any, key: str) -> None:
        try:
            add_key(counters, key)
        except OSError:
            counters._capacity = len(counters._m)  # it counts as grown, and the next key would find no place
            raise

    def open_allocated(name: str, mode: str) -> Any:
        return _AllocatedFile(name, mode) if mode == "a+b" else open(name, mode)

    mmap_dict.open = open_allocated  # type: ignore[attr-defined]
    mmap_dict.MmapedDict._init_value = add_or_raise  # type: ignore[method-assign]
