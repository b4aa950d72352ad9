"""Rules that find a cause at some places of a run: in certain rows, at certain offsets, on certain tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.cause_case import AGREE_MEAN, MIN_TOKENS, CauseCase, counted_things, is_stationary
from rollout_inspector.diagnose.gap.tokens import GapTokens
from rollout_inspector.streams.trajectory import Mask

LAGS = (1, -1, 2, -2)
"""Shifts of a column that are looked for, in tokens."""
MIN_ZEROS = 4
"""Values of exactly 0.0 in a row that may be placeholders."""
# Thresholds; of d and of log-probabilities in nats. They were mended on the causes that tests.measure.gap_causes plants
# with seeds 0 to 3, and measured on other seeds: docs/benchmarks.md, "Causes of a gap".
IMPROBABLE, IMPROBABLE_REST, IMPROBABLE_EACH = 0.7, 0.2, 0.02
"""A stretch of zeros is a placeholder where the other side has one token at most at exp(-0.7), about one half. The
others together are at most at exp(-0.2), and exp(-0.02) for each token of the stretch."""
IMPROBABLE_RUN = 3.0
"""... and has the tokens of all such stretches together at most at exp(-3), 5 percent: they are not certain."""
UNLIKELY, UNLIKELY_EACH = 0.05, 0.01
"""Where a run has placeholders, others of its stretches count from exp(-0.05) and exp(-0.01) for each token on."""
TELLS, TELLING_TOKENS, FITTING = 0.3, 6, 0.85
"""A row is shifted where, of at least 6 pairs with an absolute d above 0.3, 85 percent fit with the column moved."""
TELLS_KNOWN, TELLING_TOKENS_KNOWN, FITTING_KNOWN = 0.1, 1, 0.7
"""The same once the shift is known from other rows."""
FITS = 0.25
"""A pair of tokens fits where moving the column leaves this part of d."""
OTHER_SHIFTS = 1.25
"""The rows that fit any shift are at most so many times those that fit the best one: noise fits all alike."""
REPEATS, REPEATS_MUCH = 0.05, 0.5
"""A row repeats its routing from this share on; where every row repeats so much as the second, all of them do."""
NEAR_MEAN, NEAR_WIDE = 0.05, 0.1
"""Near the context limit the mean absolute d is above the first, and so is this share of the tokens there."""
NEAR_TIMES, NEAR_TIMES_GUESSED, NEAR_TIMES_ROW = 4, 6, 3
"""The mean there over that of all others: where the limit is known, where it is guessed, and within the same rows."""
HEAVY_ID, HEAVY_ID_TIMES = 0.2, 8
"""The mean absolute d of a heavy id, and of all heavy ids over all others."""
HEAVY_IDS_GAP, HEAVY_IDS_TOKENS = 0.5, 0.1
"""Heavy ids hold this share of the gap at least, and this share of the tokens at most."""
HEAVY_PLACE, HEAVY_PLACE_TIMES = 0.5, 20
"""The absolute d of a heavy token at least, and its quotient over the median."""
HEAVY_PLACES_GAP, HEAVY_PLACES_TOKENS, CROWDED = 0.25, 0.01, 0.1
"""Heavy tokens hold this share of the gap at least, this share of all tokens at most, and of the longest row's."""
CALM = 0.005
"""The mean absolute d around heavy tokens counts as that of any token up to twice this."""
RETOKENIZED = "row_not_sampled"
"""The kind of the finding that says that the ids of a row differ from what was sampled."""


def _row_retokenized(case: CauseCase) -> None:
    tokens = case.tokens
    is_retokenized = np.array([RETOKENIZED in row.kinds for row in tokens.rows], np.bool_)
    if not is_retokenized.any():
        if not any(row.has_calls for row in tokens.rows):
            case.undecided["row_retokenized"] = "No row has engine calls, so nothing says which ids were sampled."
        return
    n = np.maximum(np.diff(tokens.starts), 1)
    mean_elsewhere = case.mean(case.in_rows(~is_retokenized))
    wrong = is_retokenized & (tokens.per_row(tokens.size) / n >= 2 * max(AGREE_MEAN, mean_elsewhere))
    where = case.in_rows(wrong)
    if where.any():
        case.name(
            "row_retokenized", where,
            f"{counted_things(int(wrong.sum()), 'row')} {'does' if wrong.sum() == 1 else 'do'} not hold the ids that "
            f"were sampled, and the mean difference there is {case.mean(where):.3g}. "
            "Sampler and trainer read different tokens; the finding “Row was not sampled” shows them.",
        )


def _placeholder(case: CauseCase) -> None:
    tokens = case.tokens
    for side, values, other in (
        ("sampler", tokens.sampler, tokens.trainer), ("trainer", tokens.trainer, tokens.sampler)
    ):
        zero = case.left & (values == 0)
        if not zero.any():
            continue
        starts, stops = _runs(zero, tokens.starts)
        sums = np.concatenate([[0.0], np.cumsum(other, dtype=np.float64)])
        n_equal, n = sums[stops] - sums[starts], stops - starts
        # Certain tokens stand together, and among them one that the other side finds improbable; top-p leaves one token
        # where it has most of the mass. That several tokens of a stretch are improbable is none of these.
        edges = np.column_stack([starts, stops]).ravel()
        least = np.minimum.reduceat(np.append(other, 0), edges)[::2]
        wrong = (n >= MIN_ZEROS) & (least <= -IMPROBABLE)
        wrong &= n_equal - least <= -np.maximum(IMPROBABLE_REST, IMPROBABLE_EACH * n)
        if n_equal[wrong].sum() <= -IMPROBABLE_RUN:
            in_rows = np.zeros(len(tokens.rows), np.bool_)
            in_rows[tokens.row[starts[wrong]]] = True
            wrong |= (n_equal <= -UNLIKELY - UNLIKELY_EACH * n) & ((n >= MIN_ZEROS) | in_rows[tokens.row[starts]])
            where = _spread(starts[wrong], stops[wrong], len(tokens))
            case.name(
                "placeholder", where,
                f"The {side} has exactly 0.0 on {int(where.sum()):,} tokens, in "
                f"{counted_things(int(wrong.sum()), 'stretch', 'stretches')} of up to {int(n[wrong].max()):,}, where "
                f"the other side has {other[where].mean(dtype=np.float64):.3g} on the mean. "
                "These values were filled in, not computed.",
            )
            return


def _columns_shifted(case: CauseCase) -> None:
    tokens = case.tokens
    looked = tokens.per_row((tokens.size > TELLS) & case.left) >= 3
    if not looked.any():
        return
    use = np.flatnonzero(looked[tokens.row] & case.left)
    clear = {lag: _fitting_rows(tokens, use, lag, TELLS, TELLING_TOKENS, FITTING)[0] for lag in LAGS}
    lag = max(LAGS, key=lambda one: int(clear[one].sum()))
    if not clear[lag].any() or sum(int(rows.sum()) for rows in clear.values()) > OTHER_SHIFTS * int(clear[lag].sum()):
        return
    # With the shift known, rows with fewer tokens that tell it count as well.
    shifted, moved = _fitting_rows(
        tokens, np.flatnonzero(case.left), lag, TELLS_KNOWN, TELLING_TOKENS_KNOWN, FITTING_KNOWN
    )
    where = case.in_rows(shifted)
    case.name(
        "columns_shifted", where,
        f"In {counted_things(int(shifted.sum()), 'row')} the trainer's column lies {abs(lag)} "
        f"{'token' if abs(lag) == 1 else 'tokens'} {'behind' if lag > 0 else 'before'} its place, or the sampler's as "
        f"far {'before' if lag > 0 else 'behind'}: the mean difference is {case.mean(where):.3g} as it stands, and "
        f"{moved:.3g} when the column is moved back.",
    )


def _fitting_rows(
    tokens: GapTokens, use: NDArray[np.int64], lag: int, least: float, n_least: int, share: float
) -> tuple[Mask, float]:
    """The rows ``[R]`` where moving the trainer's column by ``lag`` explains d, and the mean that is then left there.

    d has to fall to a quarter in this share of the pairs of tokens that show at least ``least``. A row needs
    ``n_least`` such pairs. ``use``: places to look at ``[n]``.
    """
    step = abs(lag)
    before, after = use[:-step], use[step:]
    pair = (tokens.row[after] == tokens.row[before]) & (tokens.offset[after] - tokens.offset[before] == step)
    before, after = before[pair], after[pair]
    # Of both tokens: one heavy token at the edge of a stretch has no neighbour on one side.
    larger = np.maximum(tokens.size[before], tokens.size[after])
    trainer, sampler = (after, before) if lag > 0 else (before, after)
    misfit, row, tells = np.abs(tokens.trainer[trainer] - tokens.sampler[sampler]), tokens.row[before], larger > least
    n, fitting = (np.bincount(row[at], minlength=len(tokens.rows)) for at in (tells, tells & (misfit <= FITS * larger)))
    fits: Mask = (n >= n_least) & (fitting >= share * n)
    inside = misfit[fits[row]]
    return fits, float(inside.mean(dtype=np.float64)) if len(inside) else 0.0


def _routing_repeated(case: CauseCase) -> None:
    is_recorded = np.array([row.repeats is not None for row in case.tokens.rows], np.bool_)
    if not is_recorded.any():
        case.undecided["routing_repeated"] = "No row has a summary of its expert routing."
        return
    share = np.array([row.repeats or 0.0 for row in case.tokens.rows])
    # A model with few experts repeats some rows by nature, so that a row is compared with the one that repeats least.
    least = float(share[is_recorded].min())
    repeated = is_recorded & (share >= (REPEATS_MUCH if least >= REPEATS_MUCH else max(REPEATS, 2 * least)))
    where, others = case.in_rows(repeated), case.in_rows(~repeated)
    if not repeated.any() and least >= REPEATS and not case.agrees():
        case.undecided["routing_repeated"] = (
            "All rows repeat about as much of their routing: none shows the gap without."
        )
    mean, mean_elsewhere = case.mean(where), case.mean(others)
    if not where.any() or not case.is_apart(where, others):
        return
    case.name(
        "routing_repeated", where,
        f"{counted_things(int(repeated.sum()), 'row')} repeat {share[repeated].mean():.0%} of their routing, "
        f"and the mean difference there is {mean:.3g}"
        + (f"; in the other rows it is {mean_elsewhere:.3g}." if others.any() else "; no other row shows it without."),
    )


def _mixed_versions(case: CauseCase) -> None:
    tokens = case.tokens
    if not (tokens.version >= 0).any():
        case.undecided["mixed_versions"] = "No policy version is recorded."
        return
    newest = tokens.newest
    oldest = np.minimum.reduceat(np.where(tokens.version < 0, len(tokens.versions), tokens.version), tokens.starts[:-1])
    mixed = oldest < newest
    if not mixed.any():
        return
    of_mixed = case.in_rows(mixed)
    old = of_mixed & (tokens.version < newest[tokens.row]) & (tokens.version >= 0)
    new = of_mixed & (tokens.version == newest[tokens.row])
    mean, mean_new = case.mean(old), case.mean(new)
    if old.sum() >= MIN_TOKENS and case.is_apart(old, new):
        case.name(
            "mixed_versions", old,
            f"{counted_things(int(mixed.sum()), 'row')} hold tokens of several policy versions. On tokens of an older "
            f"version the mean "
            f"difference is {mean:.3g}, on those of the newest {mean_new:.3g}.",
        )


def _near_context_limit(case: CauseCase) -> None:
    tokens = case.tokens
    lengths = np.array([row.length for row in tokens.rows])
    cut = np.array([bool(row.is_cut) for row in tokens.rows], np.bool_)
    longest = int(lengths.max())
    if cut.any():
        limit, is_known = int(lengths[cut].max()), True
    else:
        limit, is_known = longest, int((lengths == longest).sum()) >= 2
    if limit < 64:
        return
    best: tuple[Mask, float, float, int] | None = None
    for part in (32, 16, 8):
        window = max(MIN_TOKENS, limit // part)
        near = case.left & (tokens.offset >= limit - window)
        of_rows = tokens.per_row(near) > 0
        if near.sum() < MIN_TOKENS or of_rows.sum() < (1 if is_known else 3):
            continue
        elsewhere = case.left & ~near
        same = elsewhere & of_rows[tokens.row]
        mean, mean_elsewhere, mean_before = case.mean(near), case.mean(elsewhere), case.mean(same)
        # Not a few heavy tokens that happen to stand there.
        wide = int((near & (tokens.size > NEAR_MEAN)).sum())
        is_clear = mean > NEAR_MEAN and mean >= (NEAR_TIMES if is_known else NEAR_TIMES_GUESSED) * mean_elsewhere
        is_clear &= not same.any() or mean >= NEAR_TIMES_ROW * mean_before
        is_clear &= wide >= max(8, NEAR_WIDE * int(near.sum()))
        if not elsewhere.any() or not is_clear or (best is not None and mean < best[1] / 2):
            continue
        best = near, mean, mean_elsewhere, window
    if best is not None:
        near, mean, mean_elsewhere, window = best
        reason = "rows that were cut by their length end there" if cut.any() else "the longest rows end there"
        case.name(
            "near_context_limit", near,
            f"On the last {window:,} tokens before offset {limit:,} ({reason}) the mean difference is {mean:.3g}, on "
            f"all others "
            f"{mean_elsewhere:.3g}.",
        )


def _heavy_tokens(case: CauseCase) -> None:
    _few_ids(case)
    if not any(cause.cause == "heavy_tokens" for cause in case.causes):
        _few_places(case)


def _few_ids(case: CauseCase) -> None:
    """Few token ids hold most of the gap, in all steps alike."""
    tokens, unexplained = case.tokens, case.left
    ids = np.where(unexplained & (tokens.ids >= 0), tokens.ids, 0)
    sums = np.bincount(ids, weights=np.where(unexplained, tokens.size, 0))
    counts = np.bincount(ids, weights=unexplained)
    if np.count_nonzero(counts) < 20:
        return
    top = np.argsort(sums)[::-1][:3]
    means = sums[top] / np.maximum(counts[top], 1)
    top = top[(means >= HEAVY_ID) & (means >= means.max() / 4) & (counts[top] >= 4)]
    n = int(unexplained.sum())
    if not len(top) or sums[top].sum() < HEAVY_IDS_GAP * sums.sum() or counts[top].sum() > HEAVY_IDS_TOKENS * n:
        return
    where = unexplained & np.isin(tokens.ids, top)
    mean, mean_elsewhere = case.mean(where), case.mean(unexplained & ~where)
    if mean >= HEAVY_ID_TIMES * mean_elsewhere and is_stationary(case, where, where):
        names = ", ".join(str(int(token_id)) for token_id in top)
        case.name(
            "heavy_tokens",
            where,
            f"The token {'id' if len(top) == 1 else 'ids'} {names} ({counts[top].sum() / n:.2%} of the tokens) hold "
            f"{sums[top].sum() / sums.sum():.0%} of the gap: {mean:.3g} on the mean, and {mean_elsewhere:.3g} on all "
            "others.",
        )


def _few_places(case: CauseCase) -> None:
    """Few single tokens hold most of the gap, and the tokens around them agree."""
    tokens, unexplained = case.tokens, case.left
    n = int(unexplained.sum())
    if n < 500:
        return
    size = np.where(unexplained, tokens.size, 0)
    heavy = size >= max(HEAVY_PLACE, HEAVY_PLACE_TIMES * float(np.median(size[unexplained])))
    others = unexplained & ~heavy
    if (
        heavy.sum() < 3
        or heavy.sum() > HEAVY_PLACES_TOKENS * n
        or size[heavy].sum() < HEAVY_PLACES_GAP * size.sum()
        or case.mean(others) > AGREE_MEAN
    ):
        return
    rows = np.zeros(len(tokens.rows), np.bool_)
    rows[tokens.row[heavy]] = True
    heavy_rows = tokens.per_row(heavy.astype(np.float32))[rows]
    around = case.mean(others & rows[tokens.row])
    crowded = heavy_rows.max() > CROWDED * max(np.diff(tokens.starts)[rows].max(), 1) and heavy_rows.max() > 3
    if around <= 2 * max(case.mean(others), CALM) and not crowded and is_stationary(case, heavy):
        case.name(
            "heavy_tokens",
            heavy,
            f"{counted_things(int(heavy.sum()), 'token')} of {n:,} hold {size[heavy].sum() / size.sum():.0%} of the "
            f"gap, each with a difference of at least {size[heavy].min():.3g}; on all others the mean is "
            f"{case.mean(others):.3g}.",
        )


def _runs(held: Mask, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where stretches of True begin and end; none goes over the start of a row."""
    before = np.concatenate([[False], held[:-1]])
    inner = starts[(starts > 0) & (starts < len(held))]
    before[inner] = False
    after = np.concatenate([held[1:], [False]])
    after[inner - 1] = False
    return np.flatnonzero(held & ~before), np.flatnonzero(held & ~after) + 1


def _spread(starts: NDArray[np.int64], stops: NDArray[np.int64], n: int) -> Mask:
    """True on all stretches ``[n]``."""
    edges = np.bincount(starts, minlength=n + 1) - np.bincount(stops, minlength=n + 1)
    mask: Mask = np.cumsum(edges[:-1]) > 0
    return mask


PLACE_RULES: tuple[Callable[[CauseCase], None], ...] = (
    _row_retokenized, _placeholder, _columns_shifted, _routing_repeated, _mixed_versions, _near_context_limit,
    _heavy_tokens,
)
"""In the order in which they look; what one explains, the next does not see."""
