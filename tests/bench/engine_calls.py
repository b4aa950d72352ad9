"""What the benchmarks ask of an engine in its own process, by ``EngineOwner.call``: nothing here needs Django."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.gpu_proof.bare import Measured, PlainEngine, PlainVllm, Plan, run_bare


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
