"""Places inside the data folder, the secret key, which is made once and kept there, and the lock of its one server."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from rollout_inspector.outputs import draft_file, whole_file
from rollout_inspector.refusal import Refusal

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "testserver"})
"""Names under which only browsers of this machine ask."""

# A unix socket's path is at most 107 bytes on Linux and 103 on macOS.
MAX_SOCKET_PATH = 100


def embedded_redis_socket(data: Path) -> Path:
    """The socket of the embedded Redis of this data folder. Each process computes the same path."""
    path = data.resolve() / "run" / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"rollout-inspector-{os.getuid()}-{digest}" / "redis.sock"


def broker_url(redis_url: str) -> str:
    """The address of the same Redis for Celery, which writes a unix socket as `redis+socket:` instead of `unix:`."""
    if redis_url.startswith("unix:"):
        path, _, query = redis_url.partition("?")
        database = dict(part.split("=", 1) for part in query.split("&") if "=" in part).get("db", "0")
        return f"redis+socket{path[len('unix') :]}?virtual_host={database}"
    return redis_url


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, with its parents. Raises OSError when it belongs to another user."""
    path.mkdir(parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)
    return path


def write_privately() -> None:
    """From now on, what this process and its children write can be read by their owner alone."""
    os.umask(0o077)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    with whole_file(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode())


def secret_key(data: Path) -> str:
    """The key of this data folder. It is made on first use, and only its owner can read it. Raises OSError when the
    folder can be neither read nor written."""
    path = data / "secret_key"
    if not path.exists():
        private_folder(data)
        with draft_file(data, path.name) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(secrets.token_urlsafe(50).encode())
            file.flush()
            with suppress(FileExistsError):  # when two processes start together, the key of the first one is kept
                os.link(file.name, path)
    return path.read_text(encoding="utf-8").strip()


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
