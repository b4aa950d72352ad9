"""Kills real workers in the middle of their work, and makes the time pass that others wait before they take it up."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from secrets import token_hex

import pytest
from django.contrib.sessions.models import Session
from django.db import OperationalError, connection
from django.utils import timezone

from rollouts.store.jobs.jobs import JOB_SILENT_SECONDS
from rollouts.store.models import Job
from tests.conftest import wait_until


def children_of(pid: int) -> list[int]:
    """The living child processes of a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def kill_main(worker: subprocess.Popen[bytes]) -> None:
    """Kill the main process of a worker with SIGKILL. The kernel ends its children."""
    worker.kill()
    worker.wait(60)


def kill_child(worker: subprocess.Popen[bytes], n: int = 0) -> None:
    """Kill a child of a worker with SIGKILL; a prefork worker starts another."""
    os.kill(sorted(children_of(worker.pid))[n], signal.SIGKILL)


def stop(worker: subprocess.Popen[bytes], grace: float) -> None:
    """Stop a worker as a supervisor does: SIGTERM, and SIGKILL to its group when the time of grace is over."""
    worker.send_signal(signal.SIGTERM)
    try:
        worker.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(60)


def let_time_pass() -> None:
    """Make the running jobs look as if their workers had been silent for long enough to be lost."""
    long_ago = timezone.now() - timedelta(seconds=JOB_SILENT_SECONDS + 1)
    Job.objects.filter(status=Job.Status.RUNNING).update(heartbeat_at=long_ago)


def wait_for(job: Job, *statuses: str, seconds: float = 120) -> None:
    """Wait until a job has one of these states."""

    def is_so() -> bool:
        job.refresh_from_db()
        return job.status in statuses

    wait_until(is_so, seconds, f"the job is {' or '.join(statuses)}")


@contextmanager
def full_database() -> Iterator[None]:
    """The SQLite of the test has no page for more rows, as on a full disk: the error is its own.

    The limit is the connection's; who closes that one has made room.
    """
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA page_count")
        cursor.execute(f"PRAGMA max_page_count = {cursor.fetchone()[0]}")
    expires = timezone.now() + timedelta(days=1)
    for n_bytes in (4000, 40):  # what is free within the pages; a key says which of them a row belongs to
        n_refused = 0
        while n_refused < 100:
            try:
                Session.objects.create(session_key=token_hex(20), session_data="x" * n_bytes, expire_date=expires)
                n_refused = 0
            except OperationalError:
                n_refused += 1
    try:
        yield
    finally:
        connection.close()


class SmallDisk:
    """A disk of some megabytes, in memory, mounted on a folder."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self._filler = folder / "filler"
        folder.mkdir(parents=True, exist_ok=True)
        size = f"size={megabytes}m,mode=700"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False)
        if done.returncode:
            # A right that a machine gives or not, and no package or service that could be installed there.
            pytest.skip(f"no disk can be mounted: {done.stderr.decode().strip()}")

    def fill(self) -> None:
        """Leave not a byte."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while file.write(b"x" * size):
                        pass

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)

    def set_read_only(self, is_so: bool) -> None:
        """Fails while a file is open for writing."""
        mode = "ro" if is_so else "rw"
        subprocess.run(["mount", "-o", f"remount,{mode}", self.folder], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.folder], check=True)
