"""A clock that is wrong: nothing is deleted because of it, and no work waits for a time that was written down by it."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from django.core.cache import cache
from django.utils import timezone

from rollouts.jobs.broker import DO_JOB, RUN_ROLLOUTS
from rollouts.jobs.imports import imports
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.jobs.storage import retention, unused_files
from rollouts.store import files
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run
from tests import faults
from tests.conftest import ROOT, ModelGate, database_url, wait_until
from tests.samples.clock import wrong_clock
from tests.samples.server import gym_lines

DAY, HOUR = 86400, 3600
SWEEP = """
import django
django.setup()
from rollouts.jobs.storage import unused_files
unused_files.sweep()
"""


@pytest.fixture
def old_run(settings: Any) -> Run:
    """A run that will be too old in 25 days."""
    cache.clear()
    settings.KEEP_DAYS = 30
    run = create_run("import", "five days old", status=Run.Status.DONE)
    then = timezone.now() - timedelta(days=5)
    Run.objects.update(created_at=then, finished_at=then)
    return run


@pytest.fixture
def no_mark() -> None:
    files.delete(retention.MARK)


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_clock_that_jumps_deletes_nothing(
    no_mark: None, old_run: Run, live_redis: str, tmp_path: Path, settings: Any
) -> None:
    unused_files.sweep()

    def sweep(seconds: int) -> str:
        cache.clear()
        done = subprocess.run(
            [sys.executable, "-c", SWEEP], cwd=ROOT, capture_output=True, text=True, check=True,
            env={
                **os.environ, **wrong_clock(tmp_path, seconds), "DJANGO_SETTINGS_MODULE": "inspector.settings",
                "DATABASE_URL": database_url(), "REDIS_URL": live_redis, "INSPECTOR_KEEP_DAYS": "30",
                "INSPECTOR_DATA": str(settings.INSPECTOR_DATA),
            },
        )
        return done.stderr + done.stdout

    for seconds in (40 * DAY, 40 * DAY + HOUR // 2, 0, 20 * DAY, 0):
        assert "nothing is deleted by its age" in sweep(seconds), seconds
        assert Run.objects.filter(pk=old_run.pk).exists()


@pytest.mark.django_db
@pytest.mark.parametrize(("last", "paused_until", "is_believed"), [
    (-600, 0, True), (-2 * HOUR, 0, False), (40 * DAY, 0, False), (-600, HOUR, False), (-600, -HOUR, True),
    (-600, 40 * DAY, False),
])
def test_when_the_clock_is_believed(last: float, paused_until: float, is_believed: bool, no_mark: None) -> None:
    now = timezone.now().timestamp()
    files.put(retention.MARK, io.BytesIO(f"{now + last} {now + paused_until}".encode()))
    sentence = retention.fault_of_clock(note=True)
    assert (sentence == "") is is_believed and retention.fault_of_clock() == sentence  # for doctor, which notes nothing
    assert float(files.open_file(retention.MARK).read().split()[1]) <= now + DAY + 60


@pytest.mark.django_db
def test_a_mark_that_cannot_be_read_pauses_nothing(no_mark: None) -> None:
    assert retention.fault_of_clock() == ""
    files.put(retention.MARK, io.BytesIO(b"of another version"))
    assert retention.fault_of_clock(note=True) == retention.fault_of_clock() == ""


@pytest.mark.django_db
def test_a_clock_that_differs_from_the_database_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "clock_offset", lambda: -90.0)
    assert "90 s behind the database's" in retention.fault_of_clock()


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_work_of_a_worker_with_a_clock_of_tomorrow_is_taken_over(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, slow_model: dict[str, str],
    model_gate: ModelGate,
) -> None:
    """What a clock that was set back leaves: heartbeats and leases of tomorrow, and no worker behind them."""
    (tmp_path / "a.jsonl").write_bytes(gym_lines(0, 3000))
    job = imports.ask(create_run("import", "files"), [tmp_path / "a.jsonl"])
    run = launch(LaunchSettings(prompts=40, group=4, seed=7), enqueue=False)
    wrong = {**slow_model, **wrong_clock(tmp_path, DAY)}
    model_gate.hold(after=40)  # the run cannot end
    for queue, task, key, is_begun in (
        ("engine.demo", RUN_ROLLOUTS, run.pk, lambda: run.trajectories.filter(status="done").exists()),
        ("default", DO_JOB, job.pk, lambda: Job.objects.filter(pk=job.pk, status="running").exists()),
    ):
        worker = celery_worker_process(queue, env=wrong)
        current_app.send_task(task, (key,), queue=queue)
        wait_until(is_begun, 120, f"the work of {queue} has begun")
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(60)
    job.refresh_from_db()
    run.refresh_from_db()
    assert (job.status, run.status) == ("running", "running")
    assert job.heartbeat_at > timezone.now() + timedelta(hours=12)
    assert run.heartbeat_at is not None and run.heartbeat_at > timezone.now() + timedelta(hours=12)
    for queue in ("default", "engine.demo"):
        celery_worker_process(queue, env=slow_model)
    model_gate.open()
    faults.wait_for(job, "done")

    def has_ended() -> bool:
        run.refresh_from_db()
        return run.status == "done"

    wait_until(has_ended, 180, "the run has ended")
    assert (run.n_finished, job.run.trajectories.count()) == (160, 3000)
