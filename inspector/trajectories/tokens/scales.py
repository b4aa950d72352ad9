"""The scale of a lens: fixed thresholds, so that one colour means the same in every row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.tokens.lenses import WEIGHT, Legend, Swatch, column_label
from rollout_inspector.text.html.tokens import LOGPROB_EDGES, NO_LOGPROB
from rollouts.store.trajectories import engine_columns


@dataclass(frozen=True)
class Scale:
    """Classes 0 to 8 of a value: by its size, or to both sides of 4 when it has a sign that matters."""

    edges: tuple[float, ...]  # The least size of each step away from zero: eight of them, or four with a sign. Rising.
    is_signed: bool = False
    unit: str = ""
    is_surprise: bool = False  # The values are log-probabilities: their size is the surprise.

    @property
    def paint(self) -> str:
        """The colours of the style sheet."""
        return "signed" if self.is_signed else "value"

    @property
    def edge_texts(self) -> list[str]:
        """The thresholds as numbers; ``0`` where any other value counts."""
        return [f"{edge:g}" if edge > _ANY else "0" for edge in self.edges]

    def classes(self, values: NDArray[np.float32], n: int) -> NDArray[np.int64]:
        """The class of each value ``[n]``; ``NO_LOGPROB`` where it is missing, infinite or not a number."""
        padded = np.full(n, np.nan, dtype=np.float64)
        padded[: min(len(values), n)] = values[:n]
        is_finite = np.isfinite(padded)
        steps = np.digitize(
            np.abs(np.where(is_finite, padded, 0.0)).astype(np.float32), np.asarray(self.edges, np.float32)
        )
        if self.is_signed:
            steps = 4 + np.where(padded < 0, -steps, steps)
        return np.where(is_finite, steps, NO_LOGPROB)

    def heights(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where values ``[n]`` stand in a strip, from -1 to 1: the thresholds lie at equal distances. NaN stays."""
        steps = np.interp(np.abs(values), [0.0, *self.edges], range(len(self.edges) + 1)) / len(self.edges)
        return np.where((values < 0) & self.is_signed, -steps, steps)

    def legend(self, name: str) -> Legend:
        """The thresholds in words, one for each colour."""
        signs = [">" if edge <= _ANY else "≥" for edge in self.edges]
        steps = list(zip(signs, self.edge_texts, strict=True))
        middle = "0" if self.edges[0] <= _ANY else f"<{self.edges[0]:g}"
        if self.is_signed:
            low = [(f"key-s{3 - n}", "<0" if size == "0" else f"≤-{size}", "") for n, (_, size) in enumerate(steps)]
            high = [(f"key-s{5 + n}", f"{sign}{size}", "") for n, (sign, size) in enumerate(steps)]
            swatches: list[Swatch] = [*low[::-1], ("key-s4", middle, ""), *high]
        else:
            swatches = [("key-q0", middle, "")]
            swatches += [(f"key-q{1 + n}", f"{sign}{size}", "") for n, (sign, size) in enumerate(steps)]
        words = f"{column_label(name)}{f' in {self.unit}' if self.unit else ''}"
        return swatches, (words, "the same thresholds in every row")


_ANY = 1e-6  # A value that is not 0.

SURPRISE = Scale(tuple(-edge for edge in LOGPROB_EDGES), unit="nats", is_surprise=True)
SHARE = Scale(tuple(n / 8 for n in range(1, 9)))
MISMATCH = Scale((0.01, 0.05, 0.2, 0.7), is_signed=True, unit="nats")
"""Differences of log-probabilities: ratios of about 1, 5, 20 and 100 %."""
ADVANTAGE = Scale((_ANY, 0.5, 1.0, 2.0), is_signed=True)
ENTROPY = Scale((0.01, 0.1, 0.3, 0.7, 1.4, 2.1, 3.0, 5.0), unit="nats")
BEHIND = Scale((_ANY, 0.1, 0.3, 0.7, 1.4, 2.3, 4.6, 9.2), unit="nats")
"""How far a token stands behind the likeliest one; the steps are those of the surprise."""
KEPT_SET = Scale((2, 3, 5, 10, 20, 50, 200, 1000), unit="tokens")
SIGNED = Scale((_ANY, 0.1, 1.0, 10.0), is_signed=True)
SIZE = Scale((_ANY, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0))


def scale_of(name: str, values: NDArray[np.float32]) -> Scale:
    """The scale of a column by its name. Of an unknown one only the sign of its values decides."""
    if name == "mismatch":
        return MISMATCH
    if name == engine_columns.BEHIND:
        return BEHIND
    if name == engine_columns.KEPT_SET:
        return KEPT_SET
    if "advantage" in name or name.startswith(WEIGHT):
        return ADVANTAGE
    if "logprob" in name or "log_prob" in name:
        return SURPRISE
    if "entrop" in name:
        return ENTROPY
    return SIGNED if bool((values[np.isfinite(values)] < 0).any()) else SIZE
