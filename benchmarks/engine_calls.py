"""What the benchmarks ask of an engine in its own process, by ``EngineOwner.call``: nothing here needs Django."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollouts.sampling.engines.protocol import Engine, GenerationRequest, Sampling
from tools.gpu_proof.bare import Measured, PlainVllm, Plan, run_bare


class PlainEngine:
    """An engine of ours without vLLM inside, as ``run_bare`` asks it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ask(self, name: str, ids: list[int], n_tokens: int, seed: int) -> None:
        self._engine.add(
            GenerationRequest(name, np.array(ids, dtype=np.int32), Sampling(max_tokens=n_tokens, seed=seed))
        )

    def step(self) -> Iterable[tuple[str, Sequence[int]]]:
        return [(one.request_id, one.completion_ids.tolist()) for one in self._engine.step()]

    def is_busy(self) -> bool:
        return self._engine.has_unfinished()


def forget(engine: Any) -> None:
    """What one measured run leaves in a prefix cache would be a present to the next."""
    if engine.name == "vllm":
        engine.llm_engine.reset_prefix_cache()


def bare(plans: Sequence[Plan], max_live: int, engine: Any) -> Measured:
    forget(engine)
    return run_bare(PlainVllm(engine) if engine.name == "vllm" else PlainEngine(engine), plans, max_live)


def waited_for_a_core(engine: Any) -> float:
    """Seconds that the engine's thread has stood ready to run while others had the cores (Linux; else 0)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def computed(engine: Any) -> float:
    """Processor seconds of the engine's thread: neither what waits nor who else wants the cores counts."""
    return time.thread_time()


def is_busy(engine: Any) -> bool:
    return bool(engine.has_unfinished())
