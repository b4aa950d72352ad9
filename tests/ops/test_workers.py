"""A real Celery worker over a real Redis, on the database of the test."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from django.core.cache import cache

from inspector.celery import app
from inspector.server.health import heartbeat_key
from tests.conftest import wait_until

Start = Callable[..., "subprocess.Popen[bytes]"]


def test_a_worker_reports_that_it_lives_and_that_it_leaves(celery_worker_process: Start) -> None:
    worker = celery_worker_process("engine.witness", threads=1)
    assert cache.get(heartbeat_key("engine.witness")).startswith("engine.witness")
    assert len(app.control.ping(timeout=240, limit=1)) == 1
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert cache.get(heartbeat_key("engine.witness")) is None


def test_a_killed_worker_leaves_no_pool_behind(celery_worker_process: Start) -> None:
    worker = celery_worker_process("witness", threads=2, pool="prefork")
    pool = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    assert len(pool) == 2
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not any(_lives(pid) for pid in pool), 60, "its pool has ended too")


def test_a_message_whose_task_is_gone_is_dropped(celery_worker_process: Start, tmp_path: Path) -> None:
    worker = celery_worker_process("witness", threads=1)
    app.send_task("rollouts.audit_shard", ([], {}, "audit:answer"), queue="witness")
    log = tmp_path / "worker-0.log"
    wait_until(lambda: "Received unregistered task of type 'rollouts.audit_shard'" in log.read_text(), 60, "named")
    app.send_task("celery.backend_cleanup", queue="witness")
    wait_until(lambda: "Task celery.backend_cleanup" in log.read_text(), 60, "the next message is read")
    assert worker.poll() is None


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
