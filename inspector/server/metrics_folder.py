"""The folder in which the processes of one web server count requests; claimed before prometheus_client is imported."""

from __future__ import annotations

import fcntl
import itertools
from pathlib import Path
from typing import IO

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder. prometheus_client reads it when it is imported."""


def claim_folder(data: Path) -> tuple[Path, IO[str]]:
    """A folder below the data folder for the counters of one web server, empty, and the file that holds its lock.

    The lock ends with the last process that inherited it. The next server then takes the same folder, so that servers
    that were killed leave no folders behind.
    """
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
