"""Starts a gateway as a process on a free port, waits for it, and stops it."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rollout_inspector.refusal import Refusal

START_SECONDS, STOP_SECONDS = 45.0, 30.0


def command_of(text: str) -> list[str]:
    """The words of a command. Raises :class:`Refusal` where a place is lacking or it cannot be read."""
    lacking = [name for name in ("{engine}", "{port}") if name not in text]
    if lacking:
        raise Refusal(f"The command lacks {' and '.join(lacking)}: the engine's address and the port to listen on.")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refusal(f"The command cannot be read: {error}.") from error


@contextlib.contextmanager
def started(
    command: list[str], engine: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int, Path]]:
    """The process while the block lasts; yields its port and the file of what it prints. SIGTERM ends it. ``{engine}``
    and ``{port}`` in the command are filled. Raises :class:`Refusal` where it does not begin to listen, or does not
    end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    words = [word.replace("{engine}", engine).replace("{port}", str(port)) for word in command]
    with tempfile.NamedTemporaryFile(prefix="gauntlet-") as file:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise Refusal(f"{words[0]} cannot be started: {error.strerror}.") from error
        output = Path(file.name)
        try:
            _await(process, port, output)
            yield port, output
            process.terminate()
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Refusal(f"The gateway did not end within {STOP_SECONDS:.0f} s of SIGTERM.") from error
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    stop_at = time.monotonic() + START_SECONDS
    while time.monotonic() < stop_at and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    tail = output.read_bytes()[-400:].decode(errors="replace").strip() or "It printed nothing."
    end = "" if process.returncode is None else f", and ended with {process.returncode}"
    raise Refusal(f"The gateway did not listen on 127.0.0.1:{port} within {START_SECONDS:.0f} s{end}. {tail}")
