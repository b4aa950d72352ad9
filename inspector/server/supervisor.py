"""Restarts child processes that end, and leaves none behind.

Each child leads a session of its own, so Ctrl-C reaches the supervisor alone, and the supervisor stops the children in
order. Three more things hold when that fails. The kernel signals a child when the supervisor dies. The supervisor
adopts orphaned grandchildren. At the end it kills every child and grandchild that still lives.
docs/decisions/0015-supervisor.md says why no library does this.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


def die_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when its parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signum), 0, 0, 0)


MAX_BACKOFF_SECONDS = 30.0
STEADY_AFTER_SECONDS = 60.0
MAX_LOG_BYTES = 20 << 20


@dataclass
class Child:
    """One process to keep alive: how it is started, and its state."""

    name: str  # The name in sentences: "The web server".
    command: Sequence[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    orphan_signal: int = signal.SIGKILL  # The signal that the kernel sends to the child when the supervisor dies.
    grace_s: float = 8.0  # Seconds that the child may take to end after SIGTERM.
    before_start: Callable[[], object] | None = None
    after_end: Callable[[], object] | None = None  # Called when it has ended unexpectedly.

    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float | None = None
    failures: int = 0

    def start(self) -> None:
        """Start it. Its output is appended to its log; a log above the limit is renamed to `.log.1` first."""
        if self.before_start:
            self.before_start()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        parent, orphan_signal = os.getpid(), self.orphan_signal

        def tie_to_parent() -> None:
            die_with_parent(orphan_signal)
            if os.getppid() != parent:  # the supervisor died in between
                os._exit(1)

        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                list(self.command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **self.env}, start_new_session=True, pass_fds=tuple(self.pass_fds),
                preexec_fn=tie_to_parent,
            )
        self.started_at, self.start_at = time.monotonic(), None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, signum: int) -> None:
        """Signal the process alone."""
        if self.is_alive and self.process:
            self.process.send_signal(signum)

    def kill_group(self) -> None:
        """End the process and everything of its group at once."""
        if self.process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)


class Supervisor:
    """Starts children in order, restarts those that end, stops them in the opposite order."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.children: list[Child] = []
        self.stop_requests = 0
        self.not_ours = set(_children())  # the other children of the caller are left alone
        adopt_orphans(True)

    def start(self, child: Child) -> None:
        """Start a child now, if nobody has asked to stop."""
        self.children.append(child)
        if not self.stop_requests:
            child.start()

    def catch_signals(self) -> None:
        """Ctrl-C, SIGTERM and a closed terminal ask to stop; a second time means at once."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: object) -> None:
        self.stop_requests += 1

    def watch_once(self) -> None:
        """Start each child that has ended again, after a pause that doubles each time."""
        now = time.monotonic()
        for child in self.children:
            if child.start_at is not None:
                if now >= child.start_at:
                    child.start()
            elif not child.is_alive and child.process is not None:
                child.failures = 1 if now - child.started_at > STEADY_AFTER_SECONDS else child.failures + 1
                pause = min(2.0 ** (child.failures - 1), MAX_BACKOFF_SECONDS)
                child.start_at = now + pause
                child.kill_group()
                if child.after_end:
                    child.after_end()
                self.say(
                    f"{child.name} ended unexpectedly ({how_it_ended(child.process.returncode)}); "
                    f"it is started again in {pause:.0f} s. Its log: {child.log}"
                )
        reap_adopted(self.not_ours | {child.process.pid for child in self.children if child.process})

    def run(self) -> None:
        """Watch the children until a signal asks to stop."""
        while not self.stop_requests:
            self.watch_once()
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop all children together except the first one; then the first one, on which the others depend."""
        requests = max(self.stop_requests, 1)
        first, others = self.children[:1], self.children[1:]
        for group in (others, first):
            for child in reversed(group):
                child.send(signal.SIGTERM)
            started = time.monotonic()
            while any(child.is_alive for child in group) and self.stop_requests <= requests:
                for child in group:
                    if time.monotonic() - started > child.grace_s:
                        child.kill_group()
                time.sleep(0.05)
            for child in group:
                child.kill_group()
        kill_adopted(self.not_ours)
        adopt_orphans(False)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def adopt_orphans(adopt: bool) -> None:
    """Have orphaned grandchildren become children of this process (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(36, int(adopt), 0, 0, 0)


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def reap_adopted(spared: set[int]) -> None:
    """Collect adopted processes that have ended. A `Popen` collects each process in ``spared``."""
    for pid in _children():
        if pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_adopted(spared: set[int]) -> None:
    """Kill and collect each remaining child of this process, and then the children that it adopts."""
    for _ in range(50):
        pids = [pid for pid in _children() if pid not in spared]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
