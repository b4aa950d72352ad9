"""Figures made of stored counts. Each is computed here alone; docs/architecture.md ("Figures") lists all of them."""

from __future__ import annotations


def rows_per_call(n_rows: int, n_steps: int) -> float | None:
    """Training rows for each engine call, two decimals; None without steps. At best all calls make one row."""
    return round(n_rows / n_steps, 2) if n_steps else None


def reward_mean(reward_sum: float, n_rewards: int) -> float | None:
    """The mean of the rewards of the trajectories that have one; None where none has."""
    return reward_sum / n_rewards if n_rewards else None


def trained_as_sampled(n_sampled: int, n_lost: int) -> int:
    """Sampled tokens that a row trains as they were sampled."""
    return n_sampled - n_lost


def trained_otherwise(n_trained: int, n_sampled: int, n_lost: int) -> int:
    """Trained tokens that were not sampled as they stand, or that a further row trains once more."""
    return n_trained - trained_as_sampled(n_sampled, n_lost)


def lost_or_wrong(lost: int | None, wrong: int | None) -> int:
    """What findings cost the stored rows in tokens, as far as it is known."""
    return (lost or 0) + (wrong or 0)


def share(part: float, whole: float) -> float:
    """A count as a share of another, from 0 to 1; 0 of nothing."""
    return part / whole if whole else 0.0


def percent_of(part: float | None, whole: float) -> str:
    """:func:`share` in words: ``34.9 %``. Empty where one of both is not known or there is nothing to share."""
    return f"{100 * share(part, whole):.1f} %" if part is not None and whole else ""


def trained_words(n_trained: int, n_tokens: int) -> str:
    """How many of some tokens are trained. "All" is said of none but tokens that are."""
    if not n_trained:
        return "not trained"
    return "all trained" if n_trained == n_tokens else f"{n_trained:,} of {n_tokens:,} trained"
