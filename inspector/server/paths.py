"""Places inside the data folder, and the secret key, which is made once and kept there."""

import hashlib
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from rollout_inspector.outputs import draft_file, whole_file

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
