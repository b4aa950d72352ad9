"""The thread that owns an engine: futures, aborts, a dead engine, a closed one."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait as wait_for
from contextlib import contextmanager
from typing import ClassVar

import pytest

from rollout_inspector.streams.trajectory import ids_array
from rollouts.sampling.engines import EngineError, Generation, GenerationRequest, RequestRefused, Sampling
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineLost
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("short_pauses")


def request(name: str, max_tokens: int = 5, ids: tuple[int, ...] = (1, 2, 3)) -> GenerationRequest:
    return GenerationRequest(name, ids_array(list(ids)), Sampling(max_tokens=max_tokens))


class Gated(ScriptedEngine):
    """Counts its largest batch and steps only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.batches: list[int] = []

    def step(self) -> list[Generation]:
        assert self.gate.wait(240)
        self.batches.append(len(self._live))
        return super().step()


@contextmanager
def held(owner: EngineThread) -> Iterator[None]:
    """No turn takes a part of what is asked meanwhile: the first engine sees all of it at once."""
    is_held, may_go_on = threading.Event(), threading.Event()
    owner.call(lambda _: (is_held.set(), may_go_on.wait(240)))
    assert is_held.wait(240)
    yield
    may_go_on.set()


def test_requests_of_many_threads_share_one_batch() -> None:
    engine = Gated()
    engine.gate.set()
    owner = EngineThread(lambda: engine)
    with held(owner):
        futures = [owner.submit(request(str(n))) for n in range(8)]
    assert len(wait_for(futures, timeout=240).done) == 8
    assert engine.batches == [8] * 5
    assert owner.tokens == 40
    owner.close()


def test_an_abort_cancels_the_future_and_leaves_the_others() -> None:
    engine = Gated()
    owner = EngineThread(lambda: engine)
    gone, stays = owner.submit(request("gone", 2000)), owner.submit(request("stays"))
    owner.abort(["gone", "nobody"])
    engine.gate.set()
    with pytest.raises(CancelledError):
        gone.result(240)
    assert len(stays.result(240).completion_ids) == 5
    owner.close()


def test_a_refused_request_fails_alone() -> None:
    owner = EngineThread(ScriptedEngine)
    bad, good = owner.submit(request("bad", ids=(-4,))), owner.submit(request("good"))
    with pytest.raises(RequestRefused, match="-4"):
        bad.result(240)
    assert len(good.result(240).completion_ids) == 5
    owner.close()


def test_a_dead_engine_costs_its_requests_nothing_and_is_built_again() -> None:
    """M9: the death of an engine failed all that was under way."""
    built: list[ScriptedEngine] = []

    class Dying(ScriptedEngine):
        closed = False

        def __init__(self) -> None:
            super().__init__()
            built.append(self)

        def step(self) -> list[Generation]:
            if len(built) == 1:
                raise MemoryError("no block is free")
            return super().step()

        def close(self) -> None:
            self.closed = True

    owner = EngineThread(Dying)
    with held(owner):
        futures = [owner.submit(request(str(n))) for n in range(3)]
    assert [future.result(240).request_id for future in futures] == ["0", "1", "2"]
    assert len(built) == 2 and built[0].closed
    owner.close()


class Poisoned(ScriptedEngine):
    """Dies of every prompt that begins with 13."""

    deaths: ClassVar[list[int]] = []

    def step(self) -> list[Generation]:
        if any(request.prompt_ids[0] == 13 for request, _ in self._live.values()):
            self.deaths.append(len(self._live))
            raise MemoryError("a prompt broke it")
        return super().step()


@pytest.mark.parametrize("killers", [1, 3])
def test_a_request_that_kills_every_engine_is_refused_and_no_other(killers: int) -> None:
    """M9: a prompt that kills the engine ended every trajectory beside it, then the run."""
    Poisoned.deaths.clear()
    owner = EngineThread(Poisoned)
    with held(owner):
        bad = [owner.submit(request(f"bad {n}", ids=(13, 1))) for n in range(killers)]
        good = [owner.submit(request(str(n))) for n in range(40)]
    assert {len(future.result(240).completion_ids) for future in good} == {5}
    for future in bad:
        with pytest.raises(RequestRefused, match=r"died 4 times .* The engine died: MemoryError: a prompt broke it"):
            future.result(240)
    assert Poisoned.deaths == [40 + killers] * 2 + [1] * 2 * killers
    assert len(owner.submit(request("later")).result(240).completion_ids) == 5
    owner.close()


def test_engines_that_die_one_after_another_end_all_that_waits_with_the_reason() -> None:
    built: list[ScriptedEngine] = []

    class Dead(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__()
            built.append(self)

        def step(self) -> list[Generation]:
            raise MemoryError("no block is free")

    owner = EngineThread(Dead)
    with held(owner):
        futures = [owner.submit(request(str(n))) for n in range(40)]
    errors = [future.exception(240) for future in futures]
    assert sum(isinstance(error, EngineLost) for error in errors) >= 38  # one or two may have been taken for the cause
    assert all("The engine died: MemoryError: no block is free" in str(error) for error in errors)
    assert len(built) == 6
    owner.close()


def test_an_abort_and_a_close_do_not_wait_for_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.sampling.engines.engine_owner.PAUSES", (600.0,))
    died = threading.Event()

    class Dying(ScriptedEngine):
        def close(self) -> None:
            died.set()

        def step(self) -> list[Generation]:
            raise MemoryError("no block is free")

    owner = EngineThread(Dying)
    gone, stays = owner.submit(request("gone")), owner.submit(request("stays"))
    assert died.wait(240)
    owner.abort(["gone"])
    with pytest.raises(CancelledError):
        gone.result(240)
    owner.close()
    with pytest.raises(EngineClosed):
        stays.result(240)


def test_nonsense_from_the_engine_is_its_death() -> None:
    class Lying(ScriptedEngine):
        def step(self) -> list[Generation]:
            return [
                Generation(one.request_id, ids_array([999_999]), one.logprobs[:1], one.finish_reason)
                for one in super().step()
            ]

    owner = EngineThread(Lying)
    with pytest.raises(EngineError, match="id 999999"):
        owner.submit(request("x")).result(240)
    owner.close()


def test_an_engine_that_cannot_be_built_says_why_to_everybody_who_waits() -> None:
    def build() -> ScriptedEngine:
        raise EngineError("The folder holds no model.")

    owner = EngineThread(build)
    with pytest.raises(EngineError, match="holds no model"):
        owner.ask_info().result(240)
    with pytest.raises(EngineError, match="holds no model"):
        owner.submit(request("x")).result(240)
    owner.close()


def test_info_builds_the_engine_once() -> None:
    built = []

    def build() -> ScriptedEngine:
        built.append(1)
        return ScriptedEngine(vocab_size=99)

    owner = EngineThread(build)
    for _ in range(2):
        info = owner.ask_info().result(240)
        assert (info.name, info.vocab_size) == ("scripted", 99)
    owner.submit(request("x")).result(240)
    assert built == [1]
    owner.close()


def test_a_call_runs_beside_requests_and_its_error_is_the_callers_alone() -> None:
    owner = EngineThread(ScriptedEngine)
    under_way = owner.submit(request("x", 500))
    assert owner.call(lambda engine: engine.vocab_size).result(240) > 0
    with pytest.raises(ZeroDivisionError):
        owner.call(lambda engine: 1 // 0).result(240)
    assert len(under_way.result(240).completion_ids) == 500
    owner.close()


def test_closing_fails_what_is_under_way_and_refuses_what_comes() -> None:
    engine = Gated()
    owner = EngineThread(lambda: engine)
    future = owner.submit(request("x", 2000))
    closing = threading.Thread(target=owner.close)
    closing.start()
    wait_until(lambda: owner._closing, 240, "it is closed")
    with owner._lock:  # the engine is told so before its gate opens
        engine.gate.set()
    closing.join(240)
    with pytest.raises(EngineClosed):
        future.result(240)
    with pytest.raises(EngineClosed):
        owner.submit(request("y"))
