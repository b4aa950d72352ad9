"""Runs of a toy student that a toy teacher scores, with a planted fault of the teacher's column, or none."""

from collections.abc import Callable

import numpy as np

from tests.samples.gap_runs import LENGTH, VOCABULARY, Made, ToyRun, log_softmax

Plant = Callable[[int], list[Made]]


def scored(seed: int, temperature: float = 1.0, permuted: int = 0) -> tuple[list[Made], np.random.Generator]:
    """Rows of a student with the values of a teacher that differs from it by 0.05 to 1 nat on the mean.

    The student is sure of most tokens with some seeds, and of few with others. ``permuted``: so many ids are other
    tokens to the teacher.
    """
    run = ToyRun(seed, steps=3, groups=4, drift=0.05)
    random = np.random.default_rng(seed + 1000)
    sharp = (1.0, 2.5, 4.0)[seed % 3]
    run.weights = [weights * sharp for weights in run.weights]
    rows = run.rows()
    far = (0.3, 0.8, 1.4)[seed // 3 % 3]
    logits = run.weights[0] * random.uniform(0.9, 1.2) + random.normal(0, far, (VOCABULARY, VOCABULARY))
    if permuted:
        ids = np.arange(VOCABULARY)
        ids[-permuted:] = np.roll(ids[-permuted:], 1 + permuted // 3)
        fits = ids == np.arange(VOCABULARY)
        logits = logits[ids][:, ids] if permuted == VOCABULARY else np.where(fits, logits, -25.0)
    teacher = log_softmax(logits / temperature)
    for made in rows:
        made.trainer = np.zeros(LENGTH)
        made.trainer[1:] = teacher[made.ids[:-1], made.ids[1:]]
        made.trainer = np.where(made.mask, made.trainer * np.exp(random.normal(0, 0.01, LENGTH)), 0)
    return rows, random


def clean(seed: int) -> list[Made]:
    return scored(seed)[0]


def pad_shift(seed: int) -> list[Made]:
    """By one or two tokens everywhere, or by the padding of each row, in all rows or one of two."""
    rows, random = scored(seed)
    for n, made in enumerate(rows):
        if seed % 2 and n % 2:
            continue
        lag = (1, -1, 2, int(random.integers(3, 30)))[seed % 4]
        made.trainer = np.where(made.mask, np.roll(made.trainer, lag), 0)
    return rows


def other_vocabulary(seed: int) -> list[Made]:
    """All ids, or the last third of them: added tokens. To a student that is sure of some tokens."""
    return scored((1, 2)[seed % 2] + 3 * seed, permuted=(VOCABULARY, VOCABULARY // 3)[seed % 2])[0]


def template_zeros(seed: int) -> list[Made]:
    """The first tokens of each completion, or a few ids wherever they stand, were never scored."""
    rows = clean(seed)
    common = np.bincount(np.concatenate([made.ids[made.mask] for made in rows])).argsort()[-4:]
    for made in rows:
        starts = np.flatnonzero(np.diff(made.mask.astype(int), prepend=0) == 1)
        if seed % 2:
            made.trainer[np.isin(made.ids, common) & made.mask] = 0.0
        else:
            for start in starts:
                made.trainer[start : start + 6] = 0.0
    return rows


def temperature(seed: int) -> list[Made]:
    """Of a student that is sure of many tokens: else no value tells."""
    return scored(2 + 3 * seed, temperature=(2.0, 2.5, 3.0)[seed % 3])[0]


PLANTED: dict[str, Plant] = {
    "columns_shifted": pad_shift, "other_vocabulary": other_vocabulary, "placeholder": template_zeros,
    "temperature": temperature,
}
