"""Child processes: starting one, exchanging values with it, ending it. Needs the standard library alone.

The engine's process and the storage process run code of ours and exchange pickled values with it
(:class:`PipedProcess`). Chat templates and tokenizers are what strangers wrote, and reading a pickle runs code: such
processes exchange bytes (:class:`LimitedProcess`).
"""

import contextlib
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 30.0  # How long a process that has closed its pipe may take to end before it is killed.


class ProcessEnded(Exception):
    """A child process is gone. The message is a sentence that says how it ended."""

    def __init__(self, title: str, status: int | None) -> None:
        super().__init__(f"{title} ended: {_how(status)}.")
        self.status = status  # The exit status; None = the process had not ended in time.


def _how(status: int | None) -> str:
    if status is None:
        return "it closed its pipe"
    if status == -9:
        return "it was killed (signal 9), perhaps because the machine was out of memory"
    return f"signal {-status}" if status < 0 else f"exit status {status}"


class Late(Exception):
    """A child process did not answer in time."""


class Counts(Protocol):
    """Numbers and sentences that several processes share until they expire, as a cache of Django does."""

    def add(self, key: str, value: Any, timeout: float) -> Any: ...
    def incr(self, key: str) -> Any: ...
    def get(self, key: str) -> Any: ...


class Faults:
    """How often a child process had to be ended lately because of one thing that a stranger wrote."""

    MAX, REST_SECONDS = 3, 300.0
    """After so many faults in so long the thing is not tried again, until one of them is older."""
    LOOK_SECONDS = 1.0  # How long what other processes have counted is believed.

    def __init__(self, counts: Counts | None = None, key: str = "") -> None:
        """``counts``: where the processes that try the thing ``key`` count together; None = this one counts alone."""
        self._counts, self._key, self._look_at, self._is_elsewhere = counts, key, 0.0, False
        self._times: list[float] = []
        self._sentence = ""

    def add(self, sentence: str) -> None:
        """Count a fault. ``sentence`` says what happened."""
        self._times.append(time.monotonic())
        self._sentence = sentence
        if self._counts is not None:
            for key, value in ((self._key, 0), (f"{self._key}:said", sentence)):
                self._counts.add(key, value, self.REST_SECONDS)
            with contextlib.suppress(ValueError):  # it expired just now
                self._counts.incr(self._key)
            self._look_at = 0.0

    @property
    def refusal(self) -> str:
        """Why the thing is not tried now, as a sentence; empty = it may be."""
        now = time.monotonic()
        self._times = [at for at in self._times if now - at < self.REST_SECONDS]
        if self._counts is not None and now >= self._look_at:
            self._look_at = now + self.LOOK_SECONDS
            self._is_elsewhere = int(self._counts.get(self._key) or 0) >= self.MAX
            self._sentence = self._sentence or str(self._counts.get(f"{self._key}:said") or "")
        if len(self._times) < self.MAX and not self._is_elsewhere:
            return ""
        minutes = f"{self.REST_SECONDS / 60:.0f} minutes"
        return f"{self._sentence} That happened {self.MAX} times, so it is not tried again for {minutes}."


class ChildProcess:
    """A Python process that this process started."""

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen([sys.executable, *arguments], **options)

    def wait(self, seconds: float | None) -> int | None:
        """Returns the exit status, or None when the process has not ended after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, seconds: float | None = 0) -> int:
        """Waits so many seconds for the process to end, then kills it. Returns the exit status."""
        status = self.wait(seconds)
        if status is None:
            self.process.kill()
            status = self.process.wait()
        return status


class PipedProcess(ChildProcess):
    """A process that runs ``main()`` of one of our modules and exchanges pickled values through ``pipe``. It ends when
    the pipe closes, and the death of this process closes it. A signal to the whole group does not end it."""

    def __init__(
        self, title: str, module: str, prepare: str = "", environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """``title``: the subject of sentences about it. ``prepare``: statements before ``module`` is imported."""
        package, _, name = module.rpartition(".")
        # Not ``-m``: what is pickled names the module by its own name.
        program = (
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, "
            f"signal.SIG_IGN); {prepare}from {package} import {name}; {name}.main()"
        )
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._title = title
        self.pipe, theirs = Pipe()
        super().__init__(
            ["-c", program, str(theirs.fileno())], env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, **options,
        )
        theirs.close()

    def send(self, value: Any) -> None:
        """Raises :class:`ProcessEnded`."""
        try:
            self.pipe.send(value)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Returns the next value. Raises :class:`ProcessEnded`, and what reading a pickle raises."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self, seconds: float) -> None:
        """Closes the pipe, which ends the process, and kills the process if it has not ended after so many seconds."""
        self.pipe.close()
        self.end(seconds)

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(self._title, self.end(END_SECONDS))


def pipe_to_parent() -> Connection:
    """Returns, in a :class:`PipedProcess`, its end of the pipe."""
    return Connection(int(sys.argv[1]))


class LimitedProcess(ChildProcess):
    """A process that runs what strangers wrote, with a clean environment. It sets its limits itself. Frames cross its
    standard streams: four bytes of length, little-endian, then so many bytes. It answers every frame with frames, so it
    reads whenever this process writes. After :class:`Late` or :class:`ProcessEnded`, close it."""

    MAX_FRAME = 1_000_000_000  # Bytes of the longest frame that is accepted from the process.

    def __init__(self, title: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """``title``: the subject of sentences about it. ``arguments``: the program and its own arguments."""
        self._title = title
        # Isolated: no variable of the environment says what it imports, nor that compiled code is not to be kept.
        options = ["-I", "-X", "utf8", *(["-B"] if sys.dont_write_bytecode else [])]
        super().__init__(
            [*options, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", **(environment or {})}, cwd="/",
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._readable, self._writable = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._readable.register(self._stdout, selectors.EVENT_READ)
        self._writable.register(self._stdin, selectors.EVENT_WRITE)
        self._pending = bytearray()

    def send(self, data: bytes, deadline: float) -> None:
        """Send a frame until a time of ``time.monotonic``. Raises :class:`Late` or :class:`ProcessEnded`."""
        unsent = memoryview(struct.pack("<I", len(data)) + data)
        while unsent:
            try:
                unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
            except BlockingIOError:
                if not self._writable.select(max(0.0, deadline - time.monotonic())):
                    raise Late from None
            except OSError as error:
                raise self._ended() from error

    def receive(self, deadline: float) -> bytes:
        """The next frame, until a time of ``time.monotonic``. Raises :class:`Late` or :class:`ProcessEnded`."""
        pending, n_wanted = self._pending, 4
        while True:
            if len(pending) >= 4:
                n_wanted = 4 + struct.unpack_from("<I", pending)[0]
                if n_wanted > self.MAX_FRAME:
                    raise self._ended()
                if len(pending) >= n_wanted:
                    data = bytes(pending[4:n_wanted])
                    del pending[:n_wanted]
                    return data
            if not self._readable.select(max(0.0, deadline - time.monotonic())):
                raise Late
            data = os.read(self._stdout.fileno(), 1 << 20)
            if not data:
                raise self._ended()
            pending += data

    def close(self) -> None:
        """Kills the process, if it has not ended."""
        self.end()
        self.forget()

    def forget(self) -> None:
        """Closes this process's ends of the pipes. After a fork, the process itself stays with the parent."""
        self._readable.close()
        self._writable.close()
        for stream in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                stream.close()

    def _ended(self) -> ProcessEnded:
        return ProcessEnded(self._title, self.wait(1))
