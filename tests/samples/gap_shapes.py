"""Log-probabilities of made logits of several shapes, with one fault over all tokens."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.tokens import GapCollector, GapTokens
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from tests.samples.gap_runs import kept, log_softmax

Reals = NDArray[np.float64]
STEPS, ROWS, LENGTH, PROMPT, VOCABULARY = 6, 16, 60, 4, 300
KERNELS = 0.006
"""The noise of both sides, in nats."""


def _raised(random: np.random.Generator, *heads: tuple[float, float]) -> Reals:
    """Normal logits; some are raised by a gamma of that shape and scale, as where a model is sure."""
    logits = random.normal(0, 1.5, (LENGTH, VOCABULARY))
    for place, (shape, scale) in enumerate(heads):
        logits[:, place] += random.gamma(shape, scale, LENGTH)
    return logits


SHAPES: dict[str, Callable[[np.random.Generator], Reals]] = {
    "flat": lambda random: random.normal(0, 1, (LENGTH, VOCABULARY)),
    "normal": lambda random: random.normal(0, 2, (LENGTH, VOCABULARY)),
    "zipf": lambda random: random.normal(-1.2 * np.log(np.arange(1, VOCABULARY + 1)), 0.6, (LENGTH, VOCABULARY)),
    "language": lambda random: _raised(random, (2, 4), (2, 2.5), (1, 2.5)),
    "sure": lambda random: _raised(random, (12, 1), (4, 1.7)),
    "heavy tails": lambda random: 1.5 * random.standard_t(3, (LENGTH, VOCABULARY)),
}


def shaped_gap(
    shape: str, seed: int, sampled: float = 1.0, sampler: float = 1.0, trainer: float = 1.0, top_p: float = 1.0,
    noise: float = 0.0, recorded: float | None = None,
) -> GapTokens:
    """Tokens of a run. ``sampled``, ``sampler`` and ``trainer``: the temperatures that tokens were drawn at and that
    both columns have. ``noise``: on each logit of the sampler. ``recorded``: the temperature of the engine calls."""
    random, collector = np.random.default_rng([seed, 5]), GapCollector()
    at = np.arange(LENGTH)
    for n in range(STEPS * ROWS):
        logits = SHAPES[shape](random)
        engine = logits + random.normal(0, noise, logits.shape) if noise else logits
        drawn = kept(log_softmax(engine / sampled), top_p, 0)
        left = drawn if top_p < 1 else log_softmax(engine / sampler)
        ids = (np.cumsum(np.exp(drawn), 1) < random.random((LENGTH, 1))).sum(1).clip(0, VOCABULARY - 1)
        columns = (
            np.minimum(side[at, ids] + random.normal(0, KERNELS, LENGTH), 0)
            for side in (left, log_softmax(logits / trainer))
        )
        ours, theirs = (np.concatenate([np.zeros(PROMPT), column]).astype(np.float32) for column in columns)
        whole = ids_array(np.concatenate([np.zeros(PROMPT, np.int64), ids]))
        row = Row(whole, np.arange(len(whole)) >= PROMPT, ours, columns={"trainer_logprobs": theirs}, step_indices=(0,))
        step = Step(whole[:PROMPT], whole[PROMPT:], temperature=recorded)
        value = Trajectory(f"t{n}", (step,), (row,), training_step=n // ROWS)
        collector.add(value, enumerate(value.rows), kinds={0: ()})
    return collector.done()
