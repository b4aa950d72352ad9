"""An engine in a process of its own: what crosses the pipe, and what happens when either side ends."""

import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import ids_array
from rollouts.sampling.engines import EngineError, RequestRefused, build_engine
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineLost, EngineOwner
from rollouts.sampling.engines.engine_process import EngineProcess, _ProcessLife
from rollouts.sampling.engines.protocol import EngineInfo
from rollouts.sampling.engines.scoring import score_streams
from rollouts.sampling.engines.scripted import ScriptedEngine
from tests.conftest import ROOT, wait_until
from tests.samples.engine_processes import (
    Dying, Endless, Fragile, Held, complain, killed, live_of, not_there, pid_of, request, unpicklable
)

pytestmark = pytest.mark.usefixtures("short_pauses")

Start = Callable[[Callable[[], Any]], EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    owners: list[EngineProcess] = []

    def begin(build: Callable[[], Any]) -> EngineProcess:
        owners.append(EngineProcess(build))
        return owners[-1]

    yield begin
    for owner in owners:
        owner.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # its own parent will see to it


def test_streams_and_scores_cross_the_pipe(start: Start) -> None:
    owner: EngineOwner = start(partial(build_engine, "scripted", "", vocab_size=99))
    assert owner.ask_info().result(240) == EngineInfo("scripted", "1", 2048, 99, "processed")
    (scores,) = owner.call(partial(score_streams, [ids_array([3, 1, 4])])).result(240)
    assert np.isnan(scores[0]) and scores[1:].tolist() == pytest.approx([-1 / 2, -1 / 5])
    with pytest.raises(RequestRefused, match="It holds the id 99, and the model's ids run from 0 to 98"):
        owner.call(partial(score_streams, [ids_array([99])])).result(240)


@contextmanager
def no_descriptor() -> Iterator[None]:
    """This process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_engine_that_cannot_be_started_now_is_started_later(start: Start) -> None:
    owner = start(partial(build_engine, "scripted", "", vocab_size=99))
    with no_descriptor():
        answer = owner.ask_info()
    assert answer.result(240).vocab_size == 99
    owner = start(partial(build_engine, "scripted", "", vocab_size=99))
    with no_descriptor(), pytest.raises(EngineLost, match=r"The engine cannot be started: OSError: .*Too many open"):
        owner.ask_info().result(240)
    assert owner.ask_info().result(240).vocab_size == 99


def test_requests_and_completions_cross_the_pipe(start: Start) -> None:
    owner: EngineOwner = start(partial(build_engine, "scripted", "", vocab_size=99))
    info = owner.ask_info().result(240)
    assert (info.name, info.vocab_size) == ("scripted", 99)
    futures = [owner.submit(request(str(n))) for n in range(20)]
    bad = owner.submit(request("bad", ids=(-4,)))
    here = ScriptedEngine(vocab_size=99)
    here.add(request("0"))
    (expected,) = next(done for done in iter(here.step, None) if done)
    for number, future in enumerate(futures):
        generation = future.result(240)
        assert generation.request_id == str(number) and generation.finish_reason == "length"
        assert generation.completion_ids.tolist() == expected.completion_ids.tolist()
        assert generation.logprobs.tolist() == expected.logprobs.tolist()
    with pytest.raises(RequestRefused, match="-4"):
        bad.result(240)
    assert owner.tokens == 100
    assert owner.call(pid_of).result(240) != os.getpid()


def test_an_abort_reaches_the_engine_and_leaves_the_others(start: Start) -> None:
    owner = start(Endless)
    gone, stays = owner.submit(request("gone", 500)), owner.submit(request("stays", 500))
    assert len(owner.submit(request("x")).result(240).completion_ids) == 5
    owner.abort(["gone", "nobody"])
    with pytest.raises(CancelledError):
        gone.result(240)
    assert owner.call(live_of).result(240) == 1 and not stays.done()


def test_nobody_who_asks_waits_for_a_step(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    owner = start(partial(Held, gate))
    many = tuple(range(500)) * 200  # each request is larger than what a pipe holds
    futures = [owner.submit(request(str(n), ids=many)) for n in range(10)]
    gone = owner.submit(request("gone"))
    owner.abort(["gone"])
    assert not any(future.done() for future in futures)
    gate.touch()
    assert {len(future.result(240).completion_ids) for future in futures} == {5}
    with pytest.raises(CancelledError):
        gone.result(240)


def test_engines_that_die_one_after_another_end_what_waits_and_a_new_process_follows(start: Start) -> None:
    owner = start(Dying)
    pid = owner.call(pid_of).result(240)
    futures = [owner.submit(request(str(n))) for n in range(3)]
    for future in futures:
        error = future.exception(240)
        assert isinstance(error, EngineError) and "The engine died: MemoryError: no block is free" in str(error)
    assert is_gone(pid)
    assert owner.call(pid_of).result(240) != pid


def test_an_engine_that_dies_while_nobody_waits_takes_its_process_along(start: Start) -> None:
    owner = start(Fragile)
    pid = owner.call(pid_of).result(240)
    gone = owner.submit(request("gone", 500))
    assert len(owner.submit(request("x")).result(240).completion_ids) == 5
    owner.abort(["gone"])
    with pytest.raises(CancelledError):
        gone.result(240)
    wait_until(lambda: is_gone(pid), 240, "the process of the lost engine has ended")
    assert owner.call(pid_of).result(240) != pid


def test_a_killed_process_fails_nothing(start: Start, tmp_path: Path) -> None:
    """M9: a kill -9 of the engine's process failed 55 to 80 of 256 trajectories."""
    gate = tmp_path / "gate"
    owner = start(partial(Held, gate))
    futures = [owner.submit(request(str(n))) for n in range(3)]
    wait_until((tmp_path / "held").exists, 240, "the requests are under way")
    first = owner._life
    assert isinstance(first, _ProcessLife)
    first._child.process.kill()
    gate.touch()
    assert [future.result(240).request_id for future in futures] == ["0", "1", "2"]
    assert owner.call(pid_of).result(240) != first._child.process.pid


def test_a_process_killed_again_and_again_ends_what_waits_with_a_sentence(start: Start, tmp_path: Path) -> None:
    owner = start(killed)
    error = owner.ask_info().exception(240)
    assert isinstance(error, EngineLost) and "was killed (signal 9)" in str(error) and "out of memory" in str(error)


def test_an_engine_that_cannot_be_built_says_why(start: Start) -> None:
    owner = start(not_there)
    with pytest.raises(EngineLost, match="holds no model"):
        owner.ask_info().result(240)


def test_an_answer_that_cannot_be_pickled_fails_alone(start: Start) -> None:
    owner = start(ScriptedEngine)
    with pytest.raises(EngineError, match="cannot leave the engine's process"):
        owner.call(unpicklable).result(240)
    assert len(owner.submit(request("x")).result(240).completion_ids) == 5


def test_what_the_process_logs_is_the_workers(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    owner = start(ScriptedEngine)
    with caplog.at_level(logging.INFO):
        owner.call(complain).result(240)
    assert ("rollouts.sampling.engines.test", logging.WARNING, "the cache is full n=3") in caplog.record_tuples


def test_closing_fails_what_is_under_way_and_ends_the_process(start: Start) -> None:
    owner = start(Endless)
    pid = owner.call(pid_of).result(240)
    future = owner.submit(request("x", 500))
    owner.close()
    with pytest.raises(EngineClosed):
        future.result(240)
    with pytest.raises(EngineClosed):
        owner.submit(request("y"))
    assert is_gone(pid)


WORKER = """
import sys, time
from functools import partial
from pathlib import Path
from rollouts.sampling.engines.engine_process import EngineProcess
from tests.samples.engine_processes import Endless, Held, pid_of, request
engine, folder = sys.argv[1], Path(sys.argv[2])
owner = EngineProcess(partial(Held, folder / "gate") if engine == "stuck" else Endless)
pid = owner.call(pid_of).result(240)
owner.submit(request("x", 500))
while engine == "stuck" and not (folder / "held").exists():
    time.sleep(0.01)
print(pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("engine", ["well", "stuck"])
def test_the_process_ends_with_a_worker_that_is_killed(engine: str, tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, engine, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert not is_gone(pid)
    finally:
        worker.kill()
        worker.wait(60)
    wait_until(lambda: is_gone(pid), 240, "the engine's process has ended")
