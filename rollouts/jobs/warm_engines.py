"""The engines that this worker keeps warm, one for each model and engine that it was asked for."""

import math
import threading
from functools import partial

from rollouts.jobs.launch import ServedModel
from rollouts.sampling.engines import build_engine, engine_spec
from rollouts.sampling.engines.engine_owner import EngineOwner
from rollouts.sampling.engines.engine_process import EngineProcess
from rollouts.sampling.engines.engine_thread import EngineThread

MAX_LIVE = 64  # Completions that an engine of a worker samples at once, where the model's options name no ``max_live``.
RESERVE = 1 / 4
"""Share of trajectories under way beyond ``max_live``: while their environments answer, the engine's batch is full."""

_engines: dict[tuple[str, str], EngineOwner] = {}
_engines_lock = threading.Lock()


def engine_of(model: ServedModel, engine: str) -> EngineOwner:
    """The owner of this model's engine in this worker. The engine is built when it is first needed."""
    with _engines_lock:
        key = (model.name, engine)
        if key not in _engines:
            _engines[key] = new_owner(model, engine)
        return _engines[key]


def new_owner(model: ServedModel, engine: str) -> EngineOwner:
    """An engine that computes gets a process, an engine that waits for a server gets a thread."""
    path, options = model.engine_arguments(engine)
    name = f"engine-{model.name}"
    if engine_spec(engine).is_light:
        return EngineThread(partial(build_engine, engine, path, **options), name)
    return EngineProcess(partial(build_engine, engine, path, **{**options, "max_live": max_live(model)}), name)


def max_live(model: ServedModel) -> int:
    """How many completions of a model its engine samples at once."""
    return int(model.options.get("max_live", MAX_LIVE))


def live_trajectories(model: ServedModel, engine: str) -> int:
    """How many trajectories of one run are under way at once in one worker."""
    n = max_live(model)
    # A server has its own batch, whose size this worker does not know.
    return n if engine_spec(engine).is_light else n + math.ceil(n * RESERVE)


def warm_engines() -> dict[tuple[str, str], int]:
    """(model, engine name) of each engine that this worker keeps warm -> tokens that it has sampled."""
    with _engines_lock:
        return {key: owner.tokens for key, owner in _engines.items()}


def close() -> None:
    """Close every engine of this worker."""
    with _engines_lock:
        owners = list(_engines.values())
        _engines.clear()
    for owner in owners:
        owner.close()
