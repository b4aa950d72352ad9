"""Kills real workers in the middle of their work, and makes the time pass that others wait before they take it up."""

from __future__ import annotations

import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from rollouts.store.jobs.activity import JOB_SILENT_SECONDS
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
