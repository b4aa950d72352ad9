"""The built-in lenses: what the fill colour of a token shows. Switch, legend, notes and script follow from ``LENSES``.

A lens that needs its own CSS classes adds them to ``rollout_inspector/text/html/tokens.py``, and their colours to
``tokens.css``.
A lens that is a scale from 0 to 8 only computes ``classes``. A trainer's column is a lens without an entry here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollout_inspector.streams.trajectory import Origin, Tokens
from rollout_inspector.text.html.tokens import LOGPROB_EDGES, NO_LOGPROB
from rollouts.store.trajectories import engine_columns

DEFAULT = "mask"
WEIGHT = "weight_"  # What the name of a lens begins with that shows the weight of a token in a loss; a rule follows.


GRADIENT = "gradient_norm"  # The lens of the norm of each token's contribution to the gradient of the output layer.
PART = "part:"  # What the name of a lens begins with that shows a part of the gap of each token; the part follows.

Swatch = tuple[str, str, str]  # One colour of a legend: its CSS class, what it says, and more of it as a title.
Legend = tuple[Sequence[Swatch], tuple[str, str] | None]
"""The colours of a lens; of a scale the words before and after it."""


@dataclass(frozen=True)
class LensSpec:
    """A lens that every trajectory has."""

    slug: str  # The name of the lens in addresses, and in ``data-lens`` for the style sheet.
    label: str
    legend: Legend
    note: Callable[[Tokens, str], str]
    """Takes tokens and words for their place. Returns why the lens colours none of them; empty when it colours some."""
    classes: Callable[[Tokens], NDArray[np.int64]] | None = None
    """Returns the class 0 to 8 of each token ``[n]``, 9 = none. None: ``Tokens`` always hold what the lens shows."""
    splits_runs: bool = False  # The run view splits its runs by the classes of the log-probability.

    @property
    def paint(self) -> str:
        """The lens as the style sheet knows it."""
        return "value" if self.classes else self.slug

    @property
    def request(self) -> str:
        """When the browser asks the server for another lens: ``always``, ``runs`` (in the run view) or ``never``."""
        return "always" if self.classes else "runs" if self.splits_runs else "never"


def _mask_note(tokens: Tokens, here: str) -> str:
    if tokens.loss_mask.any():
        return ""
    return f"The loss-mask lens colours nothing: no token {here} is under the gradient."


def _origin_note(tokens: Tokens, here: str) -> str:
    if not tokens.origin.any():
        return f"The origin lens colours nothing: every token {here} belongs to the first prompt."
    if not tokens.origin_known:
        return "Nobody recorded who wrote these tokens; the origin lens takes what is trained for sampled."
    return ""


def _logprob_note(tokens: Tokens, here: str) -> str:
    if tokens.logprobs is None or bool(np.isnan(tokens.logprobs).all()):
        if bool((tokens.origin == Origin.SAMPLED).any()):
            why = "the source recorded no log-probabilities."
        else:
            why = f"no token {here} is recorded as sampled, and only sampled tokens have one."
    elif bool((np.nan_to_num(tokens.logprobs, nan=0.0) == 0.0).all()):
        why = "every recorded log-probability is exactly 0."
    else:
        return ""
    return f"The log-probability lens colours nothing: {why}"


def _logprob_swatches() -> list[Swatch]:
    swatches = []
    for index, edge in enumerate([0.0, *LOGPROB_EDGES]):
        low = LOGPROB_EDGES[index] if index < len(LOGPROB_EDGES) else None
        title = f"logprob {edge:g} to {low:g}" if low is not None else f"logprob below {edge:g}"
        percent = np.exp(low if low is not None else edge) * 100
        swatches.append((f"key-q{index}", f"{'≥' if low is not None else '<'}{percent:.2g}%", title))
    return swatches


LENSES: tuple[LensSpec, ...] = (
    LensSpec("mask", "loss mask", ((("key-m", "under the gradient", ""), ("", "not trained", "")), None), _mask_note),
    LensSpec(
        "origin",
        "origin",
        ([(f"key-o{origin.value}" if origin else "", origin.slug, "") for origin in Origin], None),
        _origin_note,
    ),
    LensSpec("logprob", "logprob", (_logprob_swatches(), ("certain", "surprising")), _logprob_note, splits_runs=True),
)


def find(slug: str) -> LensSpec | None:
    """The built-in lens; None for a trainer's column."""
    return next((lens for lens in LENSES if lens.slug == slug), None)


def column_label(name: str) -> str:
    """The words for the lens of a column: of a trainer, made of two, or of what an engine told."""
    if name == "mismatch":
        return "trainer − sampler"
    if name.startswith("reverse_kl:"):
        return f"reverse KL to the teacher{'' if name.count('/') < 2 else ' ' + name.split('/')[1]}"
    if name == GRADIENT:
        return "gradient"
    if name.startswith(PART):
        return f"part of the gap: {name.removeprefix(PART)}"
    if name == engine_columns.BEHIND:
        return "behind the likeliest"
    if (rule := RULES.get(name.removeprefix(WEIGHT))) is not None and name.startswith(WEIGHT):
        return f"weight: {rule.label}"
    return "trainer logprobs" if name in TRAINER_LOGPROBS else name.replace("_", " ")


LENS_OF_KIND = {
    "advantage_misplaced": "advantages", "logprob_invalid": "logprob", "logprobs_other_distribution": "mismatch",
}


def lens_of(kind: str, columns: Sequence[str]) -> str:
    """The lens that shows findings of a kind best, in a row with these columns of a trainer."""
    lens = LENS_OF_KIND.get(kind, DEFAULT)
    return lens if find(lens) is not None or lens in columns else DEFAULT


def notes(tokens: Tokens, here: str) -> dict[str, str]:
    """Lens -> why it colours nothing in ``tokens``, for each that does not."""
    if not len(tokens):
        return {lens.slug: "There are no tokens to colour yet." for lens in LENSES}
    return {lens.slug: note for lens in LENSES if (note := lens.note(tokens, here))}


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
    if name == "mismatch" or name.startswith(("reverse_kl:", PART)):
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
