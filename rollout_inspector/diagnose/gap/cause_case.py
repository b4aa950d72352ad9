"""The tokens of a run while causes are looked for: which of them no cause explains yet, and what rules ask of them."""

from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.tokens import GapTokens, values_at
from rollout_inspector.streams.trajectory import Mask

AGREE_MEAN = 0.02
"""Sampler and trainer agree when the mean absolute d is at most this, in nats: bfloat16 kernels differ by as much."""
AGREE_TAIL = 0.15  # ... and when 99 percent of the absolute d are at most this.
FINE = ((0.003, 2.5), (0.001, 10.0))
"""A mean absolute d below :data:`AGREE_MEAN` disagrees all the same, where others are so many times smaller still."""
NOISE_TIMES = 4.0
"""The noise of an engine that was measured so many times raises both limits: the other side has a noise of its own."""
MIN_TOKENS = 32  # A cause that fewer tokens show is not named.
MIN_STEPS = 4  # Training steps that a trend needs.
STATIONARY = 0.3
"""The first third of the steps shows at least this part of what the last third shows: no training made it."""
QUIET = ((1.0, 1), (1.5, 1), (3.0, 1), (1.5, 2), (1.5, 3), (2.0, 3), (3.0, 3), (3.0, 5))
"""Steps are quiet up to so many times the gap of the first one, of the second or of a later one, in the order of their
gaps. Of few steps the one in the middle is the last that counts."""


@dataclass(frozen=True)
class Cause:
    """A cause that was named."""

    cause: str  # One of :data:`CAUSES`.
    evidence: str  # A sentence with the numbers that it was decided by.
    from_step: int | None  # The first training step that shows it; None = no step is recorded.
    tokens: int  # Compared tokens that it explains.
    worst: int  # Index of the token that shows it most, in :class:`GapTokens`.


class CauseCase:
    """The tokens of a run, and which of them no cause explains yet."""

    def __init__(self, tokens: GapTokens) -> None:
        self.tokens = tokens
        self.agree_mean, self.agree_tail = limits_of(tokens.noise)
        self.left: Mask = np.ones(len(tokens), np.bool_)
        self.scope: Mask = np.ones(len(tokens), np.bool_)
        """The tokens ``[N]`` by which a cause is decided: all, or those of steps that a cause of all tokens moves
        least. What is named counts in all steps."""
        self._step_units: dict[GapTokens, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        """Tokens -> their training steps and the gap of each: several rules ask for them."""
        self._row_sums: tuple[Mask, list[NDArray[np.float64]]] = self.scope, []
        self.causes: list[Cause] = []
        self.undecided: dict[str, str] = {}

    def copied(self) -> "CauseCase":
        """A case of the same tokens in which rules can go on from here."""
        other = copy(self)
        other.causes, other.undecided = self.causes.copy(), self.undecided.copy()
        return other

    def name(self, cause: str, where: Mask, evidence: str, from_step: int | None = None) -> None:
        """Name a cause that explains the tokens ``where``."""
        tokens = self.tokens
        steps = tokens.step_of_row[np.logical_or.reduceat(where, tokens.starts[:-1])]
        first = from_step if from_step is not None else (int(steps.min()) if len(steps) and steps.min() >= 0 else None)
        worst = int(np.argmax(tokens.size if where.all() else np.where(where, tokens.size, -1)))
        self.causes.append(Cause(cause, evidence, first, int(where.sum()), worst))
        self.left = self.left & ~where  # a new array: by it what was computed for the one before is known to be old

    def mean(self, where: Mask) -> float:
        """The mean absolute d of tokens; 0 without tokens."""
        return float(values_at(self.tokens.size, where).mean(dtype=np.float64)) if where.any() else 0.0

    def row_sums(self) -> list[NDArray[np.float64]]:
        """Of the tokens of each row ``[R]`` that no cause explains: absolute d, uncertainty, number."""
        if self._row_sums[0] is not self.left:
            values = (self.tokens.size, self.tokens.uncertainty, self.left)
            self._row_sums = self.left, [self.tokens.per_row(of_tokens, self.left) for of_tokens in values]
        return self._row_sums[1]

    def per_uncertainty(self, where: Mask) -> float:
        """The absolute d over the uncertainty of tokens, so that certain tokens compare with others."""
        uncertainty = float(values_at(self.tokens.uncertainty, where).sum(dtype=np.float64))
        return float(values_at(self.tokens.size, where).sum(dtype=np.float64)) / uncertainty if uncertainty else 0.0

    def quiet(self) -> list[Mask]:
        """The tokens ``[N]`` of the training steps that agree best, from few steps to many by :data:`QUIET`.

        There a cause shows that another one covers later. All tokens where no step is recorded, or all are certain.
        """
        tokens, steps = self.tokens, self.tokens.step_of_row
        if steps.min() < 0 or not (tokens.uncertainty > AGREE_MEAN).any():
            return [np.ones(len(tokens), np.bool_)]
        if tokens not in self._step_units:
            # The geometric mean: few tokens that lie far off say little of the others.
            doubtful, logs = tokens.uncertainty > AGREE_MEAN, np.maximum(tokens.uncertainty, AGREE_MEAN)
            np.log(np.maximum(np.divide(tokens.size, logs, out=logs), FINE[1][0], out=logs), out=logs)
            names, units = means_of(steps, tokens.per_row(logs, doubtful), tokens.per_row(doubtful))
            self._step_units[tokens] = names, np.exp(units)
        names, units = self._step_units[tokens]
        limits = [times * np.sort(units)[min(nth, max(len(units) // 2, 1)) - 1] for times, nth in QUIET]
        few_to_many = sorted({int((units <= limit).sum()): limit for limit in limits}.items())
        return [tokens.of_rows(np.isin(steps, names[units <= limit])) for _, limit in few_to_many]

    def is_apart(self, where: Mask, others: Mask, factor: float = 2.0) -> bool:
        """Whether tokens disagree and others do not, by this factor. A smaller gap needs a clearer difference."""
        mean, times = self.mean(where), self.per_uncertainty(where) / max(self.per_uncertainty(others), 1e-12)
        return (mean > self.agree_mean and times >= factor) or any(
            mean > max(least, self.agree_mean - AGREE_MEAN) and times >= clear * factor for least, clear in FINE
        )

    def in_rows(self, rows: Mask) -> Mask:
        """The tokens that no cause explains, of these rows ``[R]``."""
        return self.tokens.of_rows(rows) & self.left

    def agrees(self) -> bool:
        """Whether what is left agrees to rounding."""
        size = values_at(self.tokens.size, self.left)
        is_near = not len(size) or float(size.mean(dtype=np.float64)) <= self.agree_mean
        return is_near and (not len(size) or high_quantile(size, 0.99) <= self.agree_tail)


def high_quantile(sizes: NDArray[np.float32], share: float) -> float:
    """A quantile far above the median, of the sizes that lie above twice the mean where these are enough."""
    high = sizes[sizes > 2 * sizes.mean(dtype=np.float64)]
    below, last = len(sizes) - len(high), share * (len(sizes) - 1)
    return float(np.quantile(high, (last - below) / (len(high) - 1)) if last > below else np.quantile(sizes, share))


def limits_of(noise: tuple[float, float] | None) -> tuple[float, float]:
    """The mean and the 99th percentile of the absolute d up to which both sides agree; never below those of the docs.
    ``noise``: the same two of an engine against itself; None = not measured."""
    mean, tail = noise or (0.0, 0.0)
    return max(AGREE_MEAN, NOISE_TIMES * mean), max(AGREE_TAIL, NOISE_TIMES * tail)


def is_stationary(case: CauseCase, where: Mask, of: Mask | None = None) -> bool:
    """Whether the first steps show it as the last ones do: the mean absolute d that ``where`` makes in the tokens
    ``of`` (default: all)."""
    rows, tokens = case.tokens.step_of_row, case.tokens
    if not len(rows) or rows.min() < 0:
        return True
    counts = tokens.per_row(case.left | where if of is None else of)
    _, means = means_of(rows, tokens.per_row(tokens.size, where), counts)
    if len(means) < MIN_STEPS:
        return True
    third = max(len(means) // 3, 1)
    return float(means[:third].mean()) >= STATIONARY * float(means[-third:].mean())


def means_of(
    rows: NDArray[np.int64], sums: NDArray[np.float64], counts: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The steps that have something, in order, and the quotient of both sums ``[R]`` in each."""
    steps, of = np.unique(rows, return_inverse=True)
    n = np.bincount(of, weights=counts)
    has_tokens = n > 0
    return steps[has_tokens], (np.bincount(of, weights=sums)[has_tokens] / n[has_tokens])


def counted_things(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"
