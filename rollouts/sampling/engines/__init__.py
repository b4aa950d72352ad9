"""Engines sample completions. One entry of ``ENGINES`` adds one. An engine knows ids and nothing of the database."""

from rollouts.sampling.engines.protocol import (
    Engine, EngineError, Generation, GenerationRequest, RequestRefused, Sampling, check_generation, check_request,
    reason
)
from rollouts.sampling.engines.registry import (
    ENGINES, EngineSpec, build_engine, engine_spec, offered_engines, scoring_engines
)
