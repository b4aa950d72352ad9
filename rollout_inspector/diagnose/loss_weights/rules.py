"""The rules by which a loss weighs a token, and the means that make one loss of many tokens. The weight of a token is
minus the derivative of the loss with respect to its log-probability under the trainer, at the moment of the trainer's
forward pass. It follows from stored columns. docs/loss-weights.md has formulas and sources."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]

CLIP_LOW, CLIP_HIGH = 0.2, 0.2
"""GRPO: the ratio is clipped to ``1 - CLIP_LOW .. 1 + CLIP_HIGH`` (DeepSeekMath; PPO's epsilon)."""
TIS_CAP = 2.0  # TIS: a larger ratio counts as this one (the default of verl and ms-swift).
ICEPOP_LOW, ICEPOP_HIGH = 0.5, 5.0  # IcePop: a token with a ratio outside of these is masked.
GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4  # GSPO: the clip of the sequence's ratio (the paper, section 5.1).
MAX_LOG_RATIO = 20.0  # Log-ratios beyond this count as this, so that one token does not overflow a sum.


@dataclass(frozen=True, eq=False)
class RowWeights:
    """What a rule makes of the trained tokens of a row. All arrays are ``[n]``."""

    values: Values
    """The weights before the mean, or as a rule returns them what the advantage is multiplied by. 0 = the token has no
    gradient. NaN = not decidable."""
    clipped: Flags  # The clip or the cap changed the factor.
    masked: Flags  # The rule took the token out.

    @property
    def known(self) -> Flags:
        """The tokens whose weight is decidable."""
        return np.isfinite(self.values)


@dataclass(frozen=True)
class LossRule:
    """How a loss weighs a token."""

    slug: str
    label: str
    formula: str  # The factor of the advantage, with ``r = exp(trainer - sampler)``.
    text: str
    source: str
    url: str
    weigh: Callable[[Values, Values], RowWeights]  # Takes log-ratios and advantages ``[n]``, all finite.
    needs_ratio: bool = True  # It needs the log-probabilities of sampler and trainer.
    of_row: bool = False
    """One ratio counts for the whole row, so that every trained token of the row needs both log-probabilities."""


def _uncorrected(d: Values, advantages: Values) -> RowWeights:
    none = np.zeros(len(advantages), dtype=np.bool_)
    return RowWeights(np.ones(len(advantages)), none, none)


def _clipped(ratio: Values, advantages: Values, low: float, high: float) -> RowWeights:
    """Of ``min(r A, clip(r) A)``: where the clipped term is the smaller one, it is constant and has no gradient."""
    clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
    return RowWeights(np.where(clipped, 0.0, ratio), clipped, np.zeros(len(ratio), dtype=np.bool_))


def _tis(d: Values, advantages: Values) -> RowWeights:
    ratio = np.exp(d)
    return RowWeights(np.minimum(ratio, TIS_CAP), ratio > TIS_CAP, np.zeros(len(d), dtype=np.bool_))


def _icepop(d: Values, advantages: Values) -> RowWeights:
    ratio = np.exp(d)
    masked = (ratio < ICEPOP_LOW) | (ratio > ICEPOP_HIGH)
    return RowWeights(np.where(masked, 0.0, ratio), np.zeros(len(d), dtype=np.bool_), masked)


def _gspo(d: Values, advantages: Values) -> RowWeights:
    """``d``: of one row. Its mean is the log of the row's ratio."""
    return _clipped(np.full(len(d), np.exp(d.mean() if len(d) else 0.0)), advantages, GSPO_LOW, GSPO_HIGH)


RULES: dict[str, LossRule] = {
    rule.slug: rule
    for rule in (
        LossRule(
            "uncorrected", "no correction", "1",
            "The advantage alone: the trainer takes its log-probabilities for the sampler's.",
            "Williams 1992, REINFORCE", "https://doi.org/10.1007/BF00992696", _uncorrected, needs_ratio=False,
        ),
        LossRule(
            "grpo", "GRPO", f"r, and 0 where A > 0 and r > {1 + CLIP_HIGH:g}, or A < 0 and r < {1 - CLIP_LOW:g}",
            "The ratio to the policy that sampled, clipped on the side on which the advantage pushes.",
            "Shao et al. 2024, DeepSeekMath", "https://arxiv.org/abs/2402.03300",
            lambda d, advantages: _clipped(np.exp(d), advantages, CLIP_LOW, CLIP_HIGH),
        ),
        LossRule(
            "tis", "TIS", f"min(r, {TIS_CAP:g})",
            "Truncated importance sampling: the ratio, capped above.",
            "Yao et al. 2025", "https://fengyao.notion.site/off-policy-rl", _tis,
        ),
        LossRule(
            "icepop", "IcePop", f"r, and 0 where r < {ICEPOP_LOW:g} or r > {ICEPOP_HIGH:g}",
            "The ratio; a token whose ratio leaves the band on either side is masked.",
            "Zhao et al. 2025, IcePop", "https://ringtech.notion.site/icepop", _icepop,
        ),
        LossRule(
            "gspo", "GSPO", f"s = exp(mean of log r over the row), clipped at 1 - {GSPO_LOW:g} and 1 + {GSPO_HIGH:g}",
            "One ratio for a row, the geometric mean of its tokens' ratios; the clip keeps or drops whole rows.",
            "Zheng et al. 2025, GSPO", "https://arxiv.org/abs/2507.18071", _gspo, of_row=True,
        ),
    )
}
"""The rules by slug, the simplest first."""


@dataclass(frozen=True)
class LossMean:
    """How the losses of the tokens of a batch become one number."""

    slug: str
    label: str
    formula: str
    """What the weight of a token is multiplied by. N: trained tokens, R: rows of the batch, T: tokens of the row."""
    source: str


MEANS: dict[str, LossMean] = {
    mean.slug: mean
    for mean in (
        LossMean(
            "row_mean", "sequence mean with length normalisation", "1 / (R T)", "GRPO, GSPO; verl: seq-mean-token-mean"
        ),
        LossMean(
            "row_sum", "sequence mean without length normalisation", "1 / R", "Dr. GRPO; verl: seq-mean-token-sum"
        ),
        LossMean("token_mean", "token mean", "1 / N", "DAPO; verl: token-mean"),
    )
}
"""The means by slug. T and N count the tokens under the loss mask, also those that a rule clips or masks."""
