"""A launched run through a real Celery worker over a real Redis.

Engines that compute are real where a test is about them. Otherwise a server answers slowly: what a worker does with its
run is then the same, and it costs neither torch nor the processor.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from inspector.server import workers
from rollouts.jobs.launch import LaunchSettings, launch, resume
from rollouts.store.models import Run, StoredStep, StoredTrajectory
from rollouts.store.runs.runs import cancel_run
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker.run_rollouts import run_rollouts
from tests.conftest import ModelGate, _answers, missing, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., subprocess.Popen[bytes]]
AT_ONCE = 8
"""Completions that a worker has the slow model make at the same time."""


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis of this file's own, so that a test may kill it."""
    from inspector.server.redis_process import redis_binary

    try:
        redis_binary()
    except FileNotFoundError as error:
        missing(str(error))
    folder = Path(tempfile.mkdtemp(prefix="inspector-redis-"))
    _REDIS["folder"] = folder
    _start_redis()
    yield f"unix://{folder}/redis.sock?db=0"
    _REDIS["process"].kill()
    _REDIS["process"].wait(60)
    shutil.rmtree(folder, ignore_errors=True)


_REDIS: dict[str, Any] = {}


def _start_redis() -> subprocess.Popen[bytes]:
    """Start it where it was before, if it does not run."""
    from inspector.server.redis_process import redis_command

    folder = _REDIS["folder"]
    socket = folder / "redis.sock"
    if "process" not in _REDIS or _REDIS["process"].poll() is not None:
        _REDIS["process"] = subprocess.Popen(
            redis_command(socket, folder), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        wait_until(lambda: _answers(f"unix://{socket}?db=0"), 240, "the embedded Redis answers")
    process: subprocess.Popen[bytes] = _REDIS["process"]
    return process


@pytest.fixture
def own_redis(redis_url: str) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    yield _start_redis
    _start_redis()


def _ended(run: Run) -> bool:
    run.refresh_from_db()
    return run.status not in ("queued", "running")


def _check_streams(run: Run) -> None:
    for record in run.trajectories.filter(status="done"):
        trajectory = load_trajectory(record)
        assert [step.index for step in record.steps.order_by("index")] == list(range(len(trajectory.steps)))
        for before, after in pairwise(trajectory.steps):
            assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist()


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_goes_through_a_real_worker_to_its_end(
    celery_worker_process: Start, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    celery_worker_process("engine.demo", env={"INSPECTOR_ENGINE": engine})
    run = launch(LaunchSettings(prompts=8, group=2, temperature=0.0, seed=3, engine=engine))
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.error, run.n_finished, run.n_failed) == ("done", "", 16, 0)
    assert set(StoredStep.objects.filter(trajectory__run=run).values_list("logprobs_mode", flat=True)) == {"processed"}
    assert all(step.engine.startswith(f"{engine} ") for step in StoredStep.objects.filter(trajectory__run=run))
    _check_streams(run)
    right = run.trajectories.filter(reward=1.0).count()
    assert right >= 10, f"the demo policy answered {right} of 16"


@pytest.mark.sqlite_only
def test_two_runs_share_one_worker(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    celery_worker_process("engine.demo", env=slow_model)
    model_gate.hold()
    runs = [launch(LaunchSettings(prompts=10, group=2, seed=seed), enqueue=False) for seed in (1, 2)]
    for run in runs:
        run_rollouts.apply_async((run.pk,), queue="engine.demo")
    # Neither waits for the other to end.
    wait_until(lambda: Run.objects.filter(started_at=None).count() == 0, 240, "both have begun")
    model_gate.open()
    for run in runs:
        wait_until(lambda run=run: _ended(run), 240, "the run has ended")  # type: ignore[misc]
        assert (run.status, run.n_finished) == ("done", 20)


@pytest.mark.sqlite_only
def test_cancel_reaches_the_engine(celery_worker_process: Start, tmp_path: Path) -> None:
    celery_worker_process("engine.demo")
    run = launch(LaunchSettings(prompts=500, group=4, seed=5))
    wait_until(lambda: run.trajectories.filter(status="done").exists(), 240, "something is done")
    cancel_run(run)
    wait_until(lambda: _ended(run), 240, "the cancelled run has ended")
    assert run.status == "cancelled" and run.n_finished < 2000
    assert not run.trajectories.filter(status__in=("queued", "running")).exists()
    log = tmp_path / "worker-0.log"
    wait_until(lambda: "requests dropped name=engine-demo" in log.read_text(), 240, "the engine dropped its requests")
    assert re.search(r"requests dropped name=engine-demo n=[1-9]\d* left=0", log.read_text())
    # The worker is free: it samples nothing of the cancelled run any more.
    n_sampled = run.n_sampled
    after = launch(LaunchSettings(prompts=2, group=1, seed=1))
    wait_until(lambda: _ended(after), 240, "the next run has ended")
    run.refresh_from_db()
    assert after.status == "done" and run.n_sampled == n_sampled
    assert "engine lost" not in log.read_text()


def _warm(queue: str) -> Run:
    """A small run, ended: the queue's worker has its engine loaded and the process that stores for it started."""
    run = launch(LaunchSettings(prompts=1, group=1), enqueue=False)
    run_rollouts.apply_async((run.pk,), queue=queue)
    wait_until(lambda: _ended(run), 240, "the first small run has ended")
    return run


def _in_the_middle(gate: ModelGate, seed: int) -> Run:
    """A run of which a part is stored, eight trajectories are under way and others are not begun."""
    gate.hold(after=20)
    run = launch(LaunchSettings(prompts=12, group=4, seed=seed))
    wait_until(
        lambda: gate.n_waiting == AT_ONCE and run.trajectories.filter(status="done").exists(), 240, "some are done"
    )
    return run


def test_two_workers_on_two_queues_share_the_trajectories_of_one_run(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    queues = ("engine.demo", "engine.spare")
    before = {}
    for queue in queues:
        celery_worker_process(queue, env=slow_model)
        before[queue] = _warm(queue).n_sampled  # a worker says what it did every two seconds, so not what it says now
    model_gate.hold()
    run = launch(LaunchSettings(prompts=24, group=4, seed=4), enqueue=False)
    for queue in queues:
        run_rollouts.apply_async((run.pk,), queue=queue)
    wait_until(lambda: model_gate.n_waiting == 2 * AT_ONCE, 240, "both have begun")
    model_gate.open()
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.n_finished, run.n_failed) == ("done", 96, 0)
    assert set(run.trajectories.values_list("attempt", flat=True)) == {1}
    _check_streams(run)

    def shares() -> list[int]:
        return [n - before[queue] for queue, n in _sampled_by_worker().items()]

    wait_until(lambda: sum(shares()) == run.n_sampled, 240, "what both have sampled is what is stored")
    assert all(shares())


@pytest.mark.sqlite_only
def test_an_idle_worker_helps_with_the_run_of_another(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    """Both take the one queue of their model, and the run was sent once."""
    celery_worker_process("engine.demo", env=slow_model)
    model_gate.hold(after=40)
    run = launch(LaunchSettings(prompts=500, group=4, seed=11))
    wait_until(lambda: run.trajectories.filter(status="done").exists(), 240, "the first has begun")
    celery_worker_process("engine.demo", env=slow_model)
    wait_until(lambda: model_gate.n_waiting == 2 * AT_ONCE, 240, "both have begun")
    model_gate.open(seconds=0.2)

    def share() -> list[int]:
        found = workers.list_workers(workers.connect())
        return [sum(engine.tokens for engine in one.engines) for one in found]

    wait_until(lambda: len(share()) == 2 and all(share()), 240, "both sample")
    cancel_run(run)
    wait_until(lambda: _ended(run), 240, "the cancelled run has ended")
    assert run.status == "cancelled" and not run.n_failed
    _check_streams(run)


def _sampled_by_worker() -> dict[str, int]:
    found = workers.list_workers(workers.connect())
    return {one.queues[0]: sum(engine.tokens for engine in one.engines) for one in found}


@pytest.mark.sqlite_only
def test_killed_processes_of_a_worker_cost_nothing(celery_worker_process: Start, tmp_path: Path) -> None:
    """M9: two deaths of the storage process failed the run, one of the engine's process what was under way."""
    worker = celery_worker_process("engine.demo")
    run = launch(LaunchSettings(prompts=25, group=4, seed=8))
    lost: set[int] = set()

    def storing() -> set[int]:
        return set(_children(worker.pid, "storage_process")) - lost

    for n in range(3):
        # At once, while it stores the first batch: how much of the run that is depends on the machine.
        wait_until(lambda: bool(storing()), 240, "something is to be stored")
        if n == 0:
            (engine,) = _children(worker.pid, "engine_process")
            os.kill(engine, signal.SIGKILL)
        for pid in storing():
            os.kill(pid, signal.SIGKILL)
            lost.add(pid)
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.error, run.n_finished, run.n_failed) == ("done", "", 100, 0)
    assert "engine lost name=engine-demo n=1" in (tmp_path / "worker-0.log").read_text()
    assert set(run.trajectories.values_list("attempt", flat=True)) == {1}
    assert run.n_steps == StoredStep.objects.filter(trajectory__run=run).count()
    assert run.n_sampled == sum(
        StoredStep.objects.filter(trajectory__run=run).values_list("completion_length", flat=True)
    )
    _check_streams(run)
    (storage,) = storing()
    # Where cores are scarce the engine and the loop go first.
    assert os.getpriority(os.PRIO_PROCESS, storage) > os.getpriority(os.PRIO_PROCESS, worker.pid)


def _children(pid: int, module: str) -> list[int]:
    """The living processes that a worker started to run a module of ours."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _read(task / "children").split()
    ]
    return [child for child in children if f"import {module};".encode() in _read(Path(f"/proc/{child}/cmdline"))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


@pytest.mark.sqlite_only
def test_a_killed_worker_costs_no_stored_step(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    first = celery_worker_process("engine.demo", env=slow_model)
    run = _in_the_middle(model_gate, seed=6)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(60)
    run.refresh_from_db()
    assert run.status == "running"
    stored = _stored(run)
    # What half a minute's silence brings about: the leases and the heartbeat are old.
    past = timezone.now() - timedelta(seconds=31)
    StoredTrajectory.objects.filter(run=run, status="running").update(lease_until=past + timedelta(seconds=20))
    Run.objects.filter(pk=run.pk).update(heartbeat_at=past)
    model_gate.open()
    celery_worker_process("engine.demo", env=slow_model)
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.n_finished, run.n_failed) == ("done", 48, 0)
    after = _stored(run)
    assert stored and all(after[key] == value for key, value in stored.items())
    _check_streams(run)
    assert run.n_steps == StoredStep.objects.filter(trajectory__run=run).count()


def test_a_living_worker_takes_over_what_a_killed_one_held(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    """Two work on one run; one is killed. The other does what is left, and what the dead one held as leases run out."""
    queues = ("engine.demo", "engine.spare")
    workers_of = {queue: celery_worker_process(queue, env=slow_model) for queue in queues}
    model_gate.hold(after=24)
    run = launch(LaunchSettings(prompts=24, group=4, seed=6), enqueue=False)
    for queue in queues:
        run_rollouts.apply_async((run.pk,), queue=queue)
    wait_until(lambda: model_gate.n_waiting == 2 * AT_ONCE, 240, "both have some under way")
    spare = workers_of["engine.spare"]
    os.killpg(spare.pid, signal.SIGKILL)
    spare.wait(60)
    killed = timezone.now()
    model_gate.open()
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.n_finished, run.n_failed) == ("done", 96, 0)
    assert run.n_steps == StoredStep.objects.filter(trajectory__run=run).count()
    _check_streams(run)
    ends = run.trajectories.filter(attempt=2).values_list("finished_at", flat=True)
    assert len(ends) >= AT_ONCE and min(ends) > killed


@pytest.mark.sqlite_only
def test_a_redis_restarted_in_mid_run_costs_nothing(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate,
    own_redis: Callable[[], subprocess.Popen[bytes]],
) -> None:
    redis = own_redis()
    first = celery_worker_process("engine.demo", env=slow_model)
    run = _in_the_middle(model_gate, seed=9)
    redis.kill()
    redis.wait(60)
    before = run.trajectories.filter(status="done").count()
    model_gate.open()
    wait_until(lambda: _ended(run) or run.trajectories.filter(status="done").count() > before, 240, "it goes on")
    late = launch(LaunchSettings(prompts=2, group=1, seed=9))
    assert late.status == "failed" and "resume the run" in late.error
    own_redis()
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.n_finished, run.n_failed) == ("done", 48, 0)
    # Celery's consumer does not outlive its broker's connection: it ends its work first, and its supervisor (serve, or
    # the system's own) starts the next one.
    wait_until(lambda: first.poll() is not None, 240, "the worker without a broker has ended")
    celery_worker_process("engine.demo", env=slow_model)
    assert resume(late) == 2
    wait_until(lambda: _ended(late), 240, "the resumed run has ended")
    assert (late.status, late.n_finished, late.n_failed) == ("done", 2, 0)
    assert run.n_steps == StoredStep.objects.filter(trajectory__run=run).count()


@pytest.mark.sqlite_only
def test_a_worker_that_is_asked_to_stop_hands_its_run_to_the_next(
    celery_worker_process: Start, slow_model: dict[str, str], model_gate: ModelGate
) -> None:
    first = celery_worker_process("engine.demo", env=slow_model)
    run = _in_the_middle(model_gate, seed=7)
    first.send_signal(signal.SIGTERM)
    assert first.wait(240) == 0
    model_gate.open()
    run.refresh_from_db()
    assert run.status == "running" and not run.trajectories.filter(status="running").exists()
    celery_worker_process("engine.demo", env=slow_model)
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert (run.status, run.n_finished, run.n_failed) == ("done", 48, 0)
    _check_streams(run)


@pytest.mark.sqlite_only
def test_a_launched_run_says_why_it_failed(celery_worker_process: Start, tmp_path: Any, tiny_tokenizer: Any) -> None:
    for file in tiny_tokenizer.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    models = {"demo": {"engine": "transformers", "path": str(tmp_path)}}
    celery_worker_process("engine.demo", env={"INSPECTOR_MODELS": json.dumps(models)})
    run = launch(LaunchSettings(prompts=2, group=2))
    wait_until(lambda: _ended(run), 240, "the run has ended")
    assert run.status == "failed" and "could not load the model" in run.error and run.n_failed == 4


def _stored(run: Run) -> dict[tuple[int, int], tuple[int, int, bytes]]:
    steps = StoredStep.objects.filter(trajectory__run=run).select_related("tokens")
    return {
        (step.trajectory_id, step.index): (step.pk, step.prompt_length, step.tokens.completion_ids.tobytes())
        for step in steps
    }
