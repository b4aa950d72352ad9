"""Figures of the gap that can be added up: over rows, over trajectories, over training steps.

``d = trainer - sampler`` is the logarithm of the importance ratio of a token. Only tokens under the loss mask that have
both finite values are compared. The estimators of the divergence are those of John Schulman, "Approximating KL
Divergence" (2020), with samples of the sampler: ``k1 = -d``, ``k2 = d * d / 2``, ``k3 = exp(d) - 1 - d``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Row

TRAINER_LOGPROBS = ("trainer_logprobs", "prev_logprobs", "old_log_probs", "policy_logprobs")
"""Columns that hold the trainer's log-probabilities, in the order in which they are looked for."""
LEAST = 1e-6  # Smaller differences count as none.
BLOCK = 1 << 16  # Differences that are read at a time: their arrays stay in the processor's cache.
PER_OCTAVE = 8  # Buckets of sizes from one power of two to the next: a quantile is exact to 9 percent.
_MAX_LOG_RATIO = 20.0  # A ratio beyond ``exp(20)`` counts as that in k3, so that one token does not overflow a sum.


Pairs = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]
"""The tokens of a row that can be compared: offsets, log-probabilities of sampler and trainer, each ``[n]``."""


def trainer_column(row: Row) -> str:
    """The name of the trainer's log-probabilities in a row; empty = the row has none of the length of its ids."""
    n = len(row.ids)
    return next((name for name in TRAINER_LOGPROBS if name in row.columns and len(row.columns[name]) == n), "")


def pairs_of(row: Row) -> Pairs | None:
    """The tokens of a row with both log-probabilities; None = a side is missing or of another length."""
    name, n = trainer_column(row), len(row.ids)
    if row.logprobs is None or name not in row.columns:
        return None
    if {len(row.logprobs), len(row.columns[name]), len(row.loss_mask)} != {n}:
        return None
    sampler, trainer = row.logprobs, row.columns[name]
    offsets = np.flatnonzero(row.loss_mask & np.isfinite(sampler) & np.isfinite(trainer))
    return offsets, sampler[offsets].astype(np.float64), trainer[offsets].astype(np.float64)


@dataclass(frozen=True)
class GapFigures:
    """Sums over tokens. Two of them are added by :func:`added`."""

    tokens: int = 0  # Tokens that were compared.
    total: float = 0.0  # The sum of d.
    total_abs: float = 0.0  # The sum of the absolute d.
    total_square: float = 0.0  # The sum of the squares of d.
    k3: float = 0.0  # The sum of k3.
    lowest: float = 0.0
    highest: float = 0.0  # The least and the greatest d.
    buckets: Mapping[int, int] = field(default_factory=dict)
    """Bucket of a size of d -> tokens: ``+b`` for d above 0, ``-b`` below, 0 for less than :data:`LEAST`."""

    @classmethod
    def of(cls, d: NDArray[np.floating[Any]]) -> GapFigures:
        """The figures of differences ``[n]``, all finite."""
        if not len(d):
            return cls()
        if len(d) > BLOCK:
            return added(cls.of(d[start : start + BLOCK]) for start in range(0, len(d), BLOCK))
        d = d.astype(np.float64)
        size = np.abs(d)
        bucket = np.floor(np.log2(np.maximum(size, LEAST) / LEAST) * PER_OCTAVE).astype(np.int64) + 1
        signed = np.where(size < LEAST, 0, np.where(d < 0, -bucket, bucket))
        least = int(signed.min())
        counts = np.bincount(signed - least)  # a hundred buckets or so, and no sort
        buckets = np.flatnonzero(counts)
        near = np.minimum(d, _MAX_LOG_RATIO)
        return cls(
            len(d), float(d.sum()), float(size.sum()), float((d * d).sum()), float((np.expm1(near) - near).sum()),
            float(d.min()), float(d.max()),
            dict(zip((buckets + least).tolist(), counts[buckets].tolist(), strict=True)),
        )

    @property
    def mean(self) -> float | None:
        """Of d."""
        return self.total / self.tokens if self.tokens else None

    @property
    def mean_abs(self) -> float | None:
        return self.total_abs / self.tokens if self.tokens else None

    @property
    def mean_k3(self) -> float | None:
        return self.k3 / self.tokens if self.tokens else None

    @property
    def largest(self) -> float | None:
        """The greatest absolute d."""
        return max(self.highest, -self.lowest) if self.tokens else None

    def size_quantile(self, share: float) -> float | None:
        """The size of d below which ``share`` of the tokens lie, to 9 percent. None without tokens."""
        sizes: Counter[int] = Counter()
        for bucket, n in self.buckets.items():
            sizes[abs(bucket)] += n
        return self._at(sorted(sizes.items()), share, 0.0, max(self.highest, -self.lowest))

    def quantile(self, share: float) -> float | None:
        """The d below which ``share`` of the tokens lie, to 9 percent. None without tokens."""
        return self._at(sorted(self.buckets.items()), share, self.lowest, self.highest)

    def _at(self, buckets: Iterable[tuple[int, int]], share: float, lowest: float, highest: float) -> float | None:
        if not self.tokens:
            return None
        total, target = 0, max(share * self.tokens, 1)
        for bucket, n in buckets:
            total += n
            if total >= target:
                return middle_of(bucket, lowest, highest)
        return highest

    def values(self) -> dict[str, float | int | None]:
        """What pages, twins and commands show of them."""
        return {
            "tokens": self.tokens, "mean_abs": self.mean_abs, "k3": self.mean_k3, "median": self.size_quantile(0.5),
            "p99": self.size_quantile(0.99), "largest": self.largest, "ess": effective_share(self), "mean": self.mean,
        }

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads. Buckets stand as one flat list."""
        flat = [number for pair in sorted(self.buckets.items()) for number in pair]
        return {
            "n": self.tokens, "d": self.total, "abs": self.total_abs, "square": self.total_square, "k3": self.k3,
            "low": self.lowest, "high": self.highest, "buckets": flat,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> GapFigures:
        flat = value["buckets"]
        return cls(
            value["n"], value["d"], value["abs"], value["square"], value["k3"], value["low"], value["high"],
            dict(zip(flat[::2], flat[1::2], strict=True)),
        )


def middle_of(bucket: int, lowest: float, highest: float) -> float:
    """The d in the middle of a bucket, never beyond the least and the greatest d."""
    if bucket == 0:
        return 0.0
    size = float(LEAST * 2 ** ((abs(bucket) - 0.5) / PER_OCTAVE))
    return min(size, highest) if bucket > 0 else max(-size, lowest)


def added(figures: Iterable[GapFigures]) -> GapFigures:
    """The figures of all tokens of several."""
    filled = [part for part in figures if part.tokens]
    if not filled:
        return GapFigures()
    buckets: Counter[int] = Counter()
    for part in filled:
        buckets.update(part.buckets)
    return GapFigures(
        tokens=sum(part.tokens for part in filled), total=sum(part.total for part in filled),
        total_abs=sum(part.total_abs for part in filled), total_square=sum(part.total_square for part in filled),
        k3=sum(part.k3 for part in filled), lowest=min(part.lowest for part in filled),
        highest=max(part.highest for part in filled), buckets=buckets,
    )


def effective_share(figures: GapFigures) -> float | None:
    """The effective sample size of the importance ratios ``exp(d)``, as a share of the tokens. None without tokens.
    ``(sum w)^2 / (n * sum w^2)`` (Kish 1965), to the precision of the buckets."""
    total = square = 0.0
    for bucket, n in figures.buckets.items():
        ratio = math.exp(min(middle_of(bucket, figures.lowest, figures.highest), _MAX_LOG_RATIO))
        total, square = total + n * ratio, square + n * ratio * ratio
    return total * total / (figures.tokens * square) if figures.tokens else None


def gap_of_rows(rows: Iterable[Row]) -> GapFigures | None:
    """The gap over the rows of a trajectory; None = no row has both log-probabilities."""
    pairs_of_rows = [pairs for row in rows if (pairs := pairs_of(row)) is not None]
    if not pairs_of_rows:
        return None
    return GapFigures.of(np.concatenate([trainer - sampler for _, sampler, trainer in pairs_of_rows]))
