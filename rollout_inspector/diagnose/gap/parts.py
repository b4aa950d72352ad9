"""The gap of each token as a sum of named parts, where an engine has scored and decoded the run again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.token_classes import TokenClass
from rollout_inspector.diagnose.gap.tokens import GapTokens

SAMPLED, KEPT, DECODE, ENGINES, WEIGHTS, BOTH, TRAINER = PARTS = (
    "rest", "kept set", "decode against prefill", "engine against engine", "weights (version)", "engine and weights",
    "trainer",
)
"""In the order in which they are added: from the sampler's value to the trainer's."""
BY_CLASS = "parts of the gap, "  # What the name of a table of parts begins with; the class of the tokens follows.


@dataclass(frozen=True)
class EnginePass:
    """What one engine with one set of weights says of a run. Both names are of :attr:`GapTokens.scored`."""

    prefill: str  # The column that was read at once.
    decode: str  # The column that was decoded token by token.
    engine: str  # The engine with its version.
    weights: str  # The served model with a digest of its weights.


def parts_of(tokens: GapTokens, replays: Sequence[EnginePass]) -> dict[str, NDArray[np.float64]]:
    """Part -> its nats ``[N]``, so that their sum is ``d``; NaN where a token lacks a value. Empty without a replay.
    The first replay stands for the sampler's engine. What it does not give again is the kept set, where its mass is
    recorded, and the rest. The rest is another engine, other weights or another cache when the run was sampled."""
    if not replays or not len(tokens):
        return {}
    columns = {name: values.astype(np.float64) for name, values in tokens.scored.items()}
    first, last = replays[0], replays[-1]
    parts = dict.fromkeys(PARTS, np.zeros(len(tokens)))
    parts[KEPT] = np.zeros(len(tokens)) if tokens.kept_mass is None else tokens.kept_mass.astype(np.float64)
    parts[SAMPLED] = columns[first.decode] - tokens.sampler - parts[KEPT]
    parts[DECODE] = columns[first.prefill] - columns[first.decode]
    for before, behind in pairwise(replays):
        is_same = before.engine == behind.engine, before.weights == behind.weights
        name = {(True, False): WEIGHTS, (False, True): ENGINES}.get(is_same, BOTH)
        parts[name] = parts[name] + columns[behind.prefill] - columns[before.prefill]
    parts[TRAINER] = tokens.trainer - columns[last.prefill]
    return parts


def parts_report(tokens: GapTokens, replays: Sequence[EnginePass]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Tables of the parts: of all tokens, and of each class. A line has the tokens, both means, and the share.

    ``share``: the part of the sum of absolute parts. Parts that are 0 everywhere are left out, the rest is told always.
    """
    parts = parts_of(tokens, replays)
    has_all = np.isfinite(sum(parts.values(), np.zeros(len(tokens))))
    for label, use in [("all tokens", has_all), *((of.label, has_all & (tokens.kind == of)) for of in TokenClass)]:
        if not parts or not use.any():
            continue
        whole = sum(float(np.abs(values[use]).sum()) for values in parts.values()) or 1.0
        yield f"{BY_CLASS}{label}", [
            {
                "name": name, "tokens": int(use.sum()), "mean_abs": float(np.abs(values[use]).mean()),
                "mean": float(values[use].mean()), "share": float(np.abs(values[use]).sum()) / whole,
                "equal": int((values[use] == 0).sum()),
            }
            for name, values in parts.items() if name == SAMPLED or np.any(values[use])
        ]
