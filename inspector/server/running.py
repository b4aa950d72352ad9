"""The server that runs on a data folder. A locked file lets at most one run."""

import contextlib
import fcntl
import json
import os
from pathlib import Path

from inspector.server.paths import private_folder
from rollout_inspector.refusal import Refusal


class AlreadyRunning(Refusal):
    """Another server holds the data folder."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(f"Rollout Inspector already runs on this data folder, at {url} (process {pid}).")
        self.url, self.pid = url, pid


class ServerLock:
    """The lock that a server holds while it runs. The kernel releases the lock when the process ends in any way."""

    def __init__(self, data: Path) -> None:
        self.path = private_folder(data / "run") / "serve.lock"
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115  open as long as the lock is held

    def take(self) -> None:
        """Take the lock. Raises AlreadyRunning."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            url, pid = _read(self.path)
            raise AlreadyRunning(url, pid) from None

    def announce(self, url: str) -> None:
        """Write the address of the server into the file, for `running_url`."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({"url": url, "pid": os.getpid()}))
        self._file.flush()

    def release(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.truncate(0)
            self._file.close()


def _read(path: Path) -> tuple[str, int]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["url"]), int(record["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an address it has not said yet", 0


def running_url(data: Path) -> str | None:
    """The address of the server that runs on this data folder, or None."""
    lock = ServerLock(data)
    try:
        lock.take()
    except AlreadyRunning as running:
        return running.url if running.pid else None
    finally:
        lock._file.close()
    return None
