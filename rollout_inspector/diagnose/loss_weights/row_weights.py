"""The tokens of a row as a loss sees them, and the weight of each under a rule."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS, trainer_column
from rollout_inspector.diagnose.loss_weights.rules import MAX_LOG_RATIO, LossRule, RowWeights, Values
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import Floats, Row

ADVANTAGES = "advantages"  # A trainer's column of advantages; any name that holds ``advantage`` is read as one.


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The tokens of a row under the loss mask. Arrays are ``[n]``; NaN = not known."""

    offsets: NDArray[np.int64]  # Offsets in the row.
    advantages: Values
    log_ratios: Values  # ``trainer - sampler``, at most 20 in size.
    lacks: tuple[str, ...]  # The columns that the row lacks, of ``advantages``, ``sampler`` and ``trainer``.
    has_column: bool  # A trainer's column holds the advantages.


def advantage_column(row: Row) -> str:
    """The name of the advantages in a row; empty = it has none of the length of its ids."""
    names = [name for name in row.columns if "advantage" in name and len(row.columns[name]) == len(row.ids)]
    return ADVANTAGES if ADVANTAGES in names else min(names, default="")


def loss_inputs(row: Row, advantage: float | None = None) -> LossInputs | None:
    """What a loss reads of a row; None = the loss mask has another length than the ids. ``advantage``: of the whole
    trajectory, for a row without a column of its own."""
    n = len(row.ids)
    if len(row.loss_mask) != n:
        return None
    offsets = np.flatnonzero(row.loss_mask)
    column, trainer = advantage_column(row), trainer_column(row)
    if column:
        advantages = _known(row.columns[column], offsets)
    else:
        advantages = np.full(len(offsets), np.nan if advantage is None else advantage)
    sampler = row.logprobs if row.logprobs is not None and len(row.logprobs) == n else None
    log_ratios = np.full(len(offsets), np.nan)
    if sampler is not None and trainer:
        log_ratios = _known(row.columns[trainer], offsets) - _known(sampler, offsets)
    lacking = {ADVANTAGES: not column and advantage is None, "sampler": sampler is None, "trainer": not trainer}
    return LossInputs(
        offsets, advantages, np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO),
        tuple(name for name, lacks in lacking.items() if lacks), bool(column),
    )


def _known(values: Floats, offsets: NDArray[np.int64]) -> Values:
    column = values[offsets].astype(np.float64)
    return np.where(np.isfinite(column), column, np.nan)


def row_weights(inputs: LossInputs, rule: LossRule) -> RowWeights:
    """The weight of each trained token under a rule. A token that lacks a value that the rule needs has none."""
    n = len(inputs.offsets)
    use = np.ones(n, dtype=np.bool_)
    if rule.needs_ratio:
        use = np.isfinite(inputs.log_ratios)
        use = np.full(n, use.all()) if rule.of_row else use
    # The ratio of a row is that of all its trained tokens, whether or not each of them has an advantage.
    weighed = rule.weigh(inputs.log_ratios[use], np.nan_to_num(inputs.advantages[use]))
    values, clipped, masked = np.full(n, np.nan), np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_)
    values[use] = weighed.values * inputs.advantages[use]
    clipped[use], masked[use] = weighed.clipped, weighed.masked
    is_known = np.isfinite(values)
    return RowWeights(values, clipped & is_known, masked & is_known)


def missing_words(lacks: Sequence[str]) -> str:
    """The columns that a weight lacks, in words that name them."""
    words = {
        ADVANTAGES: "the advantages (a column “advantages”, or rewards of a group)",
        "sampler": "the sampler’s log-probabilities",
        "trainer": f"the trainer’s log-probabilities (a column such as {', '.join(TRAINER_LOGPROBS[:3])})",
    }
    return " and ".join(words[name] for name in lacks)


def common_advantage(rows: Sequence[Row]) -> float | None:
    """The advantage that all trained tokens of the rows have in their columns; None = there is no such number."""
    whole = ((row, advantage_column(row)) for row in rows if len(row.loss_mask) == len(row.ids))
    columns = [row.columns[column][row.loss_mask] for row, column in whole if column]
    values = np.concatenate([np.zeros(0, dtype=np.float32), *columns])
    if not len(values) or not np.isfinite(values).all() or float(np.ptp(values)) > 1e-6:
        return None
    return float(values[0])


def with_columns_of(row: Row, stored: Sequence[Row], with_advantages: bool) -> Row:
    """A row that a strategy made, with the trainer's values that are known for it.

    A token has the trainer's log-probability of a stored row where both rows are alike up to and with that token: the
    trainer read the same. Behind the first other id it is not known, because nobody made that forward pass.
    ``with_advantages``: the same for the advantages.
    """
    shared = [common_prefix(row.ids, other.ids) for other in stored]
    best = max(range(len(stored)), key=lambda n: shared[n], default=None)
    if best is None or not shared[best]:
        return row
    columns = {}
    for name in (advantage_column(stored[best]) if with_advantages else "", trainer_column(stored[best])):
        if name:
            values = np.full(len(row.ids), np.nan, dtype=np.float32)
            values[: shared[best]] = stored[best].columns[name][: shared[best]]
            columns[name] = values
    return replace(row, columns=columns)
