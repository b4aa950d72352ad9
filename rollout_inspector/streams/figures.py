"""Figures made of stored counts. Each is computed here alone; docs/architecture.md ("Figures") lists all of them."""

from collections.abc import Sequence


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


Z = 1.959964  # The 97.5 % quantile of the normal distribution.


def paired_difference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """The mean of second - first over pairs, and a 95 % interval around it; None of fewer than two pairs.

    Agresti and Min (2005), for numbers that are not only 0 and 1. Two pairs are added: half a pair each with the
    largest difference in either direction, and one without any. Then follows Student's t. So the interval of a few
    equal pairs is not empty. The largest difference is that of all numbers, of 0 and of 1.
    """
    n = len(pairs)
    if n < 2:
        return None
    numbers = [0.0, 1.0, *(number for pair in pairs for number in pair)]
    scale, differences = max(numbers) - min(numbers), [second - first for first, second in pairs]
    middle = sum(differences) / (n + 2)
    variance = (sum(difference**2 for difference in differences) + scale**2) / (n + 2) - middle**2
    degrees = n - 1
    # The t quantile: the expansion of Cornish and Fisher, exact to 1 % from two degrees of freedom on.
    t = Z + (Z**3 + Z) / (4 * degrees) + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * degrees**2)
    t += (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * degrees**3)
    half = t * (max(variance, 0.0) / (n + 2)) ** 0.5 + scale / (2 * (n + 2))  # a share moves in steps
    return sum(differences) / n, middle - half, middle + half
