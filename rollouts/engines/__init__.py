"""Engines: what samples. One line in ``ENGINES`` adds one; each knows ids and nothing of the database."""

from __future__ import annotations

import importlib
from typing import Any

from rollouts.engines.protocol import (
    Engine,
    EngineError,
    Generation,
    GenerationRequest,
    RequestRefused,
    Sampling,
    check_generation,
    check_request,
    reason,
)

# Where each is found; nothing is imported before it is asked for, because torch and vllm take seconds and gigabytes.
ENGINES: dict[str, str] = {
    "transformers": "rollouts.engines.transformers_engine:TransformersEngine",
    "vllm": "rollouts.engines.vllm_engine:VllmEngine",
    "vllm_server": "rollouts.engines.vllm_server:VllmServerEngine",
    "sglang_server": "rollouts.engines.sglang_server:SglangServerEngine",
    "scripted": "rollouts.engines.scripted:ScriptedEngine",
}

SERVERS = frozenset({"vllm_server", "sglang_server"})
"""Those that ask a server: built with its address instead of a model's folder."""
LIGHT = SERVERS | {"scripted"}
"""Those that compute next to nothing here; a worker gives each of the others a process of its own."""


def build_engine(name: str, path: str, **options: Any) -> Engine:
    """Load the model in folder ``path``. Raises :class:`EngineError` with a sentence when it cannot be loaded."""
    try:
        module, _, attribute = ENGINES[name].partition(":")
    except KeyError:
        raise EngineError(f"There is no engine named {name!r}; there are {', '.join(ENGINES)}.") from None
    try:
        engine: Engine = getattr(importlib.import_module(module), attribute)(path, **options)
    except EngineError:
        raise
    except ModuleNotFoundError as error:
        raise EngineError(f"The engine {name} needs the package {error.name}, which is not installed here.") from error
    except Exception as error:
        raise EngineError(f"The engine {name} could not load the model in {path}: {reason(error)}") from error
    return engine


__all__ = [
    "ENGINES",
    "LIGHT",
    "SERVERS",
    "Engine",
    "EngineError",
    "Generation",
    "GenerationRequest",
    "RequestRefused",
    "Sampling",
    "build_engine",
    "check_generation",
    "check_request",
    "reason",
]
