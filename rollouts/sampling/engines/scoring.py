"""Scoring: the log-probabilities that an engine returns for ids that it did not sample. Not every engine can."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.alternatives import KeptSets
from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.sampling.engines.protocol import EngineError, EngineInfo, RequestRefused
from rollouts.sampling.engines.registry import ENGINES, engine_spec

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 10.0
"""At 0 the likeliest token has all of the probability, so there is nothing to compare."""


def max_scored_length(info: EngineInfo) -> int:
    """The longest stream that an engine scores, in tokens."""
    return info.max_model_len - (not engine_spec(info.name).scores_full_context)


def score_streams(
    streams: Sequence[Ids], engine: Any, temperature: float = 1.0, kept: Sequence[KeptSets] | None = None
) -> list[Floats]:
    """The log-probabilities ``[T]`` of each stream, in nats; the first is NaN. Run in the engine's process by
    ``EngineOwner.call``. ``kept``: the kept sets of each stream; the logarithms of their mass are returned in place.
    Raises :class:`RequestRefused` for ids that the model does not have, for a stream that is too long, and for an
    engine that cannot score. Raises :class:`EngineError` for an answer that makes no sense."""
    if not hasattr(engine, "score"):
        raise RequestRefused(f"The engine {engine.name} cannot score ids that it did not sample. Choose another one.")
    if problem := temperature_problem(engine.name, temperature):
        raise RequestRefused(problem)
    more: dict[str, Any] = {} if temperature == 1 else {"temperature": temperature}
    if kept is not None:
        more["kept"] = [sets for ids, sets in zip(streams, kept, strict=True) if len(ids)]
    info = EngineInfo.of(engine)
    for ids in streams:
        if problem := stream_problem(ids, info):
            raise RequestRefused(problem)
    scores: list[Floats] = engine.score([ids for ids in streams if len(ids)], **more) if any(map(len, streams)) else []
    values = iter(scores)
    scored = [next(values) if len(ids) else np.zeros(0, dtype=np.float32) for ids in streams]
    for ids, stream_scores in zip(streams, scored, strict=True):
        if len(stream_scores) != len(ids):
            raise EngineError(f"The engine returned {len(stream_scores)} scores for a stream of {len(ids)} tokens.")
        behind_first = stream_scores[1:] if kept is None else stream_scores[np.isfinite(stream_scores)]
        # Written so that NaN fails too. Minus infinity is a token that the model never samples.
        if len(behind_first) and not behind_first.max() <= 1e-3:
            raise EngineError("The engine returned a score that is not a number or is above 0.")
    return scored


def temperature_problem(engine: str, temperature: float) -> str:
    """Why an engine cannot score at a temperature, as a sentence; empty = it can."""
    if not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return (
            f"Scores are made at temperatures from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, not at {temperature:g}."
        )
    if temperature != 1 and not engine_spec(engine).scores_at_temperature:
        able = " or ".join(name for name, spec in ENGINES.items() if spec.scores_at_temperature)
        return f"The engine {engine} scores at temperature 1 alone. For {temperature:g} choose the engine {able}."
    return ""


def stream_problem(ids: Ids, info: EngineInfo) -> str:
    """Why an engine cannot score a stream, as a sentence; empty = it can."""
    if not len(ids):
        return ""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= info.vocab_size:
        bad = low if low < 0 else high
        return f"It holds the id {bad}, and the model's ids run from 0 to {info.vocab_size - 1}."
    if len(ids) > (longest := max_scored_length(info)):
        return f"It has {len(ids):,} tokens, and this engine scores at most {longest:,}."
    return ""
