"""Measure the interval of a break's effect on breaks of known effect: ``python -m benchmarks.measures.break_effects``.

A policy draws one token after a prefix, and the reward depends on that token alone. The break moves its probability.
Each trial is what ``break_effect`` computes: n pairs with one seed, the difference and its 95 % interval.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rollouts.store.runs.forks import PairedDifference

TRIALS = 200


@dataclass(frozen=True)
class PlantedBreak:
    """A break whose effect is known."""

    sampled: float
    """Probability of the rewarded token on the sampled side."""
    broken: float
    """The same on the broken side."""
    n: int
    """Pairs."""
    common: float = 0.0
    """Share of the pairs whose two sides draw with one random number, as the same seeds often do."""

    @property
    def effect(self) -> float:
        return self.broken - self.sampled


@dataclass(frozen=True)
class Covered:
    """What came of the trials of one break."""

    planted: PlantedBreak
    covered: float
    """Share of the trials whose interval holds the effect."""
    seen: float
    """Share whose interval does not hold 0."""


CASES = (
    *(PlantedBreak(0.8, 0.5, n, common) for n in (64, 96, 128) for common in (0.0, 0.5, 1.0)),
    *(PlantedBreak(0.5, 0.5, n) for n in (4, 16, 64)),
    *(PlantedBreak(0.95, 0.65, n) for n in (16, 64)),
    *(PlantedBreak(1.0, 0.7, n) for n in (16, 64)),
    *(PlantedBreak(0.9, 0.9, n) for n in (8, 16)), PlantedBreak(0.99, 0.99, 16),
)


def rewards(planted: PlantedBreak, draw: random.Random) -> tuple[float, float]:
    """The rewards of both sides of one pair."""
    first, second = draw.random(), draw.random()
    if draw.random() < planted.common:
        second = first
    return float(first < planted.sampled), float(second < planted.broken)


def measured(planted: PlantedBreak, trials: int = TRIALS, seed: int = 1) -> Covered:
    """The trials of one break."""
    draw = random.Random(f"{seed} {planted}")
    effects = [PairedDifference.of([rewards(planted, draw) for _ in range(planted.n)]) for _ in range(trials)]
    covered = sum(holds(effect.interval, planted.effect) for effect in effects)
    return Covered(planted, covered / trials, sum(effect.is_seen for effect in effects) / trials)


def holds(interval: Sequence[float | None], number: float) -> bool:
    """Whether an interval holds a number."""
    low, high = interval
    return low is not None and high is not None and low <= number <= high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measured(planted, options.trials) for planted in CASES]
    for result in results:
        planted = result.planted
        print(
            json.dumps(asdict(result)) if options.json else
            f"{planted.sampled:.2f} -> {planted.broken:.2f}, n = {planted.n:>3}, common {planted.common:.1f}: "
            f"covered {result.covered:.3f}, seen {result.seen:.3f}"
        )


if __name__ == "__main__":
    main()
