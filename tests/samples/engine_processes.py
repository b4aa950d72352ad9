"""Engines that end in every way, for a process of their own, which finds them by name."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

from rollout_inspector.streams.trajectory import ids_array
from rollouts.sampling.engines import EngineError, Generation, GenerationRequest, Sampling
from rollouts.sampling.engines.scripted import ScriptedEngine


def request(name: str, max_tokens: int = 5, ids: tuple[int, ...] = (1, 2, 3)) -> GenerationRequest:
    return GenerationRequest(name, ids_array(list(ids)), Sampling(max_tokens=max_tokens))


class Endless(ScriptedEngine):
    """Answers requests of at most ten tokens; the others are under way until they are aborted."""

    def step(self) -> list[Generation]:
        time.sleep(0.001)
        waiting = {name: one for name, one in self._live.items() if one[0].sampling.max_tokens > 10}
        self._live = {name: one for name, one in self._live.items() if name not in waiting}
        finished = super().step()
        self._live |= waiting
        return finished


class Fragile(Endless):
    def abort(self, request_id: str) -> None:
        raise RuntimeError("it broke")


class Dying(ScriptedEngine):
    def step(self) -> list[Generation]:
        raise MemoryError("no block is free")


class Held(ScriptedEngine):
    """Its steps wait for a file, and make one that says so."""

    def __init__(self, gate: Path) -> None:
        super().__init__(max_model_len=1_000_000)
        self.gate = gate

    def step(self) -> list[Generation]:
        self.gate.with_name("held").touch()
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step()


def killed() -> ScriptedEngine:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def not_there() -> ScriptedEngine:
    raise EngineError("The folder holds no model.")


def pid_of(engine: object) -> int:
    return os.getpid()


def live_of(engine: Endless) -> int:
    return len(engine._live)


def unpicklable(engine: object) -> object:
    return threading.Lock()


def complain(engine: object) -> None:
    logging.getLogger("rollouts.sampling.engines.test").warning("the cache is full n=%d", 3)
