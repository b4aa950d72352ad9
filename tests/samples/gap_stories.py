"""Published stories of a gap, rebuilt from the figures that their authors gave. Each says its source and what it is.

The figures are those of the source; tokens and everything between the figures are made. A story whose authors found no
fault names no cause.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.samples.gap_runs import LENGTH, PROMPT, Made, ToyRun

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Story:
    """A published story."""

    name: str
    source: str
    """Where its figures stand."""
    figures: str
    """The figures that it was rebuilt from."""
    cause: tuple[str, ...]
    """What is to be named; empty = nothing."""
    rows: Callable[[int], list[Made]]
    """Seed -> rows."""
    first_step: int | None = None
    """The training step that shows it first; None = any."""


def _sure_rows(seed: int, steps: tuple[int, ...], rows: int = 12) -> list[Made]:
    """Rows of short answers that the sampler is sure of: both sides differ by kernels alone."""
    random = np.random.default_rng([seed, 31])
    mask = np.arange(LENGTH) >= PROMPT
    made = []
    for step in steps:
        for row in range(rows):
            ids = random.integers(1, 90, LENGTH).astype(np.int32)
            logprobs = -random.gamma(0.25, 0.4, LENGTH)
            sides = [np.minimum(logprobs + random.normal(0, 0.0015, LENGTH), 0) * mask for _ in range(2)]
            made.append(Made(step, step * rows + row, ids, mask.copy(), sides[0], sides[1]))
    return made


def _falls(random: np.random.Generator, made: Made, mean: float, share: float) -> None:
    """The trainer puts some tokens lower by an exponential size, so that the mean of all is about this."""
    wrong = random.random(LENGTH) < share
    drop = random.exponential(mean / share, LENGTH) * wrong
    made.trainer = (made.trainer - drop) * made.mask


def martingale_float32(seed: int) -> list[Made]:
    """Mean absolute difference at generations 0, 4, 8, 12: 0.0015, 0.81, 1.03, 0.26; the median ratio stays 1."""
    random = np.random.default_rng([seed, 32])
    rows = _sure_rows(seed, (0, 4, 8, 12))
    for made in rows:
        made.extra = {"engine_dtype": "bfloat16", "trainer_dtype": "float32"}
        made.versions = (f"{made.step}",)
        if made.step:
            _falls(random, made, {4: 0.81, 8: 1.03, 12: 0.26}[made.step], 0.12)
    return rows


def martingale_first_generation(seed: int) -> list[Made]:
    """The same at generation 4 alone, as the trainer sees it at that step: 0.000 against -9.3 on first tokens."""
    rows = [made for made in martingale_float32(seed) if made.step == 4]
    for made in rows:
        made.sampler[PROMPT], made.trainer[PROMPT] = 0.0, -9.257
    return rows


def martingale_autocast(seed: int) -> list[Made]:
    """After the mend both sides are within 0.0001 to 0.03 nats at every generation, though the policy collapses."""
    random = np.random.default_rng([seed, 33])
    rows = _sure_rows(seed, (0, 4, 8, 12))
    for made in rows:
        doubt = -np.expm1(made.sampler)
        made.trainer = np.minimum(made.sampler + random.normal(0, 0.03, LENGTH) * doubt, 0) * made.mask
        made.extra = {"engine_dtype": "bfloat16", "trainer_dtype": "bfloat16"}
    return rows


def martingale_raw_temperature(seed: int) -> list[Made]:
    """An engine that returns raw log-probabilities, and a trainer that divides by the temperature 0.7."""
    return ToyRun(seed).rows(temperature=(1.0, 0.7))


def trl_sleep_mode(seed: int) -> list[Made]:
    """sampling_logp_difference 0.018 at step 2, 0.201 at step 3: the engine wakes with the weights of before."""
    rows = ToyRun(seed, steps=4, groups=4, drift=0.0, rounding=0.016).rows()
    other = ToyRun(seed, steps=4, groups=4, drift=0.24, rounding=0.016).rows(lambda step: max(step - 1, 0))
    return [other[n] if made.step == 3 else made for n, made in enumerate(rows)]


def trl_top_p(seed: int) -> list[Made]:
    """top_p 0.8: the mean ratio is the kept mass, 0.896; the trainer takes the whole vocabulary."""
    return ToyRun(seed, rounding=0.01).rows(top_p=0.8)


def nemo_zero_fill(seed: int) -> list[Made]:
    """Positions that the worker could not read stay at 0.0 where the trainer has about -10.8."""
    rows = ToyRun(seed).rows()
    for made in rows[::6]:
        made.sampler[PROMPT + 4 : PROMPT + 14] = 0.0
        made.trainer[PROMPT + 6] = -10.8
    return rows


def prime_prefix_cache(seed: int) -> list[Made]:
    """The prefix cache is not reset after an update: prompts that come again disagree, new ones agree."""
    run = ToyRun(seed)
    rows = run.rows(prompt_of=lambda step, group: max(step - 1, 0) * 3 + group if group else step * 3)
    seen: dict[bytes, int] = {}
    for made in rows:
        if seen.setdefault(made.ids[:PROMPT].tobytes(), made.step) < made.step:
            made.sampler = np.minimum(made.sampler + run.random.normal(0, 0.3, LENGTH), 0) * made.mask
    return rows


STORIES = (
    Story("martingale, float32 trainer", "martingale 0.2.0 README, 2026-10-06", "0.0015, 0.81, 1.03, 0.26 nats",
          ("weights_rounded_away",), martingale_float32, 4),
    Story("martingale, the first generation that shows it", "martingale 0.2.0 README", "0.000 / -9.257",
          ("weights_rounded_away",), martingale_first_generation, 4),
    Story("martingale, bf16 autocast", "martingale 0.2.0 README", "0.0001 to 0.03 nats", (), martingale_autocast),
    Story("martingale, raw log-probabilities at 0.7", "martingale 0.2.0 README, non-claims", "temperature 0.7",
          ("temperature",), martingale_raw_temperature),
    Story("trl sleep mode", "huggingface/trl#5312", "0.018 at step 2, 0.201 at step 3",
          ("weights_not_delivered",), trl_sleep_mode, 3),
    Story("trl truncated sampling", "huggingface/trl#7269", "kept mass 0.895, ratio 0.896 at top_p 0.8",
          ("top_p_renormalised",), trl_top_p),
    Story("NeMo RL zero fill", "NVIDIA-NeMo/RL#4218", "0.0 against -10.8", ("placeholder",), nemo_zero_fill),
    Story("prime-rl prefix cache", "PrimeIntellect-ai/prime-rl#1650", "no figure: the mechanism alone",
          ("stale_cache",), prime_prefix_cache),
)
"""What the public threads say, as far as the figures in them rebuild it."""
