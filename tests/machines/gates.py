"""What machines share, as a test can take it away and bring it back: a Redis of its own, a gate before the database."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import redis

from inspector.server.redis_process import redis_command
from tests.conftest import wait_until
from tests.ports import HeldPort


class OwnRedis:
    """A Redis that keeps nothing on disk, at the same address each time it is started."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="inspector-redis-"))
        self._socket = self._folder / "redis.sock"
        self.url = f"unix://{self._socket}?db=0"
        self.start()

    def start(self) -> None:
        command = redis_command(self._socket, self._folder)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        wait_until(self._answers, 240, "Redis answers")

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(self.url) as connection:
            return bool(connection.ping())
        return False

    def kill(self) -> None:
        """End it at once; all messages are lost."""
        self._process.kill()
        self._process.wait(60)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Gate:
    """Hands on TCP connections while it is open. While it is shut, there are none and new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._sockets: set[socket.socket] = set()
        self._port = HeldPort()
        self.port = self._port.number
        self.open()

    def open(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse new connections and reset the others, as a database does that is killed."""
        _close(self._listener)
        for one in list(self._sockets):
            _close(one)

    def close(self) -> None:
        self.shut()
        self._port.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                self._sockets |= {client, server}
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._hand_on, args=pair, daemon=True).start()

    def _hand_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            _close(one)
            self._sockets.discard(one)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
