"""Rules that find a cause at some places of a run: in certain rows, at certain offsets, on certain tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rollouts.tito.gap.cause_case import AGREE_MEAN, MIN_TOKENS, CauseCase, counted_things, is_stationary
from rollouts.tito.gap.tokens import GapTokens
from rollouts.tito.trajectory import Mask

LAGS = (1, -1, 2, -2)
"""Shifts of a column that are looked for, in tokens."""
MIN_ZEROS = 4
"""Values of exactly 0.0 in a row that may be placeholders."""
RETOKENIZED = "row_not_sampled"
"""The kind of the finding that says that the ids of a row differ from what was sampled."""


def _row_retokenized(case: CauseCase) -> None:
    tokens = case.tokens
    named = np.array([RETOKENIZED in row.kinds for row in tokens.rows], np.bool_)
    if not named.any():
        if not any(row.has_calls for row in tokens.rows):
            case.undecided["row_retokenized"] = "No row has engine calls, so nothing says which ids were sampled."
        return
    n = np.maximum(np.diff(tokens.starts), 1)
    rest = case.mean(case.in_rows(~named))
    wrong = named & (tokens.per_row(tokens.size) / n >= 2 * max(AGREE_MEAN, rest))
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
        told, n = sums[stops] - sums[starts], stops - starts
        # Certain tokens stand together, and among them one that the other side finds improbable; top-p leaves one token
        # where it has most of the mass. That several tokens of a stretch are improbable is none of these.
        edges = np.column_stack([starts, stops]).ravel()
        least = np.minimum.reduceat(np.append(other, 0), edges)[::2]
        wrong = (n >= MIN_ZEROS) & (least <= -0.7) & (told - least <= -np.maximum(0.2, 0.02 * n))
        if told[wrong].sum() <= -3.0:
            in_rows = np.zeros(len(tokens.rows), np.bool_)
            in_rows[tokens.row[starts[wrong]]] = True
            wrong |= (told <= -0.05 - 0.01 * n) & ((n >= MIN_ZEROS) | in_rows[tokens.row[starts]])
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
    looked = tokens.per_row((tokens.size > 0.3) & case.left) >= 3
    if not looked.any():
        return
    use = np.flatnonzero(looked[tokens.row] & case.left)
    clear = {lag: _fitting_rows(tokens, use, lag, 0.3, 6, 0.85)[0] for lag in LAGS}
    lag = max(LAGS, key=lambda one: int(clear[one].sum()))
    if not clear[lag].any() or sum(int(rows.sum()) for rows in clear.values()) > 1.25 * int(clear[lag].sum()):
        return
    # With the shift known, rows with fewer tokens that tell it count as well.
    shifted, moved = _fitting_rows(tokens, np.flatnonzero(case.left), lag, 0.1, 1, 0.7)
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
    left, right = use[:-step], use[step:]
    pair = (tokens.row[right] == tokens.row[left]) & (tokens.offset[right] - tokens.offset[left] == step)
    left, right = left[pair], right[pair]
    # Of both tokens: one heavy token at the edge of a stretch has no neighbour on one side.
    told = np.maximum(tokens.size[left], tokens.size[right])
    trainer, sampler = (right, left) if lag > 0 else (left, right)
    misfit, row, tells = np.abs(tokens.trainer[trainer] - tokens.sampler[sampler]), tokens.row[left], told > least
    n, fitting = (np.bincount(row[at], minlength=len(tokens.rows)) for at in (tells, tells & (misfit <= 0.25 * told)))
    found: Mask = (n >= n_least) & (fitting >= share * n)
    inside = misfit[found[row]]
    return found, float(inside.mean(dtype=np.float64)) if len(inside) else 0.0


def _routing_repeated(case: CauseCase) -> None:
    known = np.array([row.repeats is not None for row in case.tokens.rows], np.bool_)
    if not known.any():
        case.undecided["routing_repeated"] = "No row has a summary of its expert routing."
        return
    share = np.array([row.repeats or 0.0 for row in case.tokens.rows])
    # A model with few experts repeats some rows by nature, so that a row is compared with the one that repeats least.
    least = float(share[known].min())
    repeated = known & (share >= (0.5 if least >= 0.5 else max(0.05, 2 * least)))
    where, others = case.in_rows(repeated), case.in_rows(~repeated)
    if not repeated.any() and least >= 0.05 and not case.agrees():
        case.undecided["routing_repeated"] = (
            "All rows repeat about as much of their routing: none shows the gap without."
        )
    mean, rest = case.mean(where), case.mean(others)
    if not where.any() or not case.is_apart(where, others):
        return
    case.name(
        "routing_repeated", where,
        f"{counted_things(int(repeated.sum()), 'row')} repeat {share[repeated].mean():.0%} of their routing, "
        f"and the mean difference there is {mean:.3g}"
        + (f"; in the other rows it is {rest:.3g}." if others.any() else "; no other row shows it without."),
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
    mean, rest = case.mean(old), case.mean(new)
    if old.sum() >= MIN_TOKENS and case.is_apart(old, new):
        case.name(
            "mixed_versions", old,
            f"{counted_things(int(mixed.sum()), 'row')} hold tokens of several policy versions. On tokens of an older "
            f"version the mean "
            f"difference is {mean:.3g}, on those of the newest {rest:.3g}.",
        )


def _near_context_limit(case: CauseCase) -> None:
    tokens = case.tokens
    lengths = np.array([row.length for row in tokens.rows])
    cut = np.array([bool(row.is_cut) for row in tokens.rows], np.bool_)
    longest = int(lengths.max())
    if cut.any():
        limit, known = int(lengths[cut].max()), True
    else:
        limit, known = longest, int((lengths == longest).sum()) >= 2
    if limit < 64:
        return
    found: tuple[Mask, float, float, int] | None = None
    for part in (32, 16, 8):
        window = max(MIN_TOKENS, limit // part)
        near = case.left & (tokens.offset >= limit - window)
        of_rows = tokens.per_row(near) > 0
        if near.sum() < MIN_TOKENS or of_rows.sum() < (1 if known else 3):
            continue
        rest = case.left & ~near
        same = rest & of_rows[tokens.row]
        mean, others, before = case.mean(near), case.mean(rest), case.mean(same)
        # Not a few heavy tokens that happen to stand there.
        wide = int((near & (tokens.size > 0.05)).sum())
        is_clear = mean > 0.05 and mean >= (4 if known else 6) * others and (not same.any() or mean >= 3 * before)
        is_clear &= wide >= max(8, 0.1 * int(near.sum()))
        if not rest.any() or not is_clear or (found is not None and mean < found[1] / 2):
            continue
        found = near, mean, others, window
    if found is not None:
        near, mean, others, window = found
        said = "rows that were cut by their length end there" if cut.any() else "the longest rows end there"
        case.name(
            "near_context_limit", near,
            f"On the last {window:,} tokens before offset {limit:,} ({said}) the mean difference is {mean:.3g}, on "
            f"all others "
            f"{others:.3g}.",
        )


def _heavy_tokens(case: CauseCase) -> None:
    _few_ids(case)
    if not any(one.cause == "heavy_tokens" for one in case.causes):
        _few_places(case)


def _few_ids(case: CauseCase) -> None:
    """Few token ids hold most of the gap, in all steps alike."""
    tokens, left = case.tokens, case.left
    ids = np.where(left & (tokens.ids >= 0), tokens.ids, 0)
    sums = np.bincount(ids, weights=np.where(left, tokens.size, 0))
    counts = np.bincount(ids, weights=left)
    if np.count_nonzero(counts) < 20:
        return
    top = np.argsort(sums)[::-1][:3]
    means = sums[top] / np.maximum(counts[top], 1)
    top = top[(means >= 0.2) & (means >= means.max() / 4) & (counts[top] >= 4)]
    n = int(left.sum())
    if not len(top) or sums[top].sum() < 0.5 * sums.sum() or counts[top].sum() > 0.1 * n:
        return
    where = left & np.isin(tokens.ids, top)
    mean, rest = case.mean(where), case.mean(left & ~where)
    if mean >= 8 * rest and is_stationary(case, where, where):
        named = ", ".join(str(int(one)) for one in top)
        case.name(
            "heavy_tokens", where,
            f"The token {'id' if len(top) == 1 else 'ids'} {named} ({counts[top].sum() / n:.2%} of the tokens) hold "
            f"{sums[top].sum() / sums.sum():.0%} of the gap: {mean:.3g} on the mean, and {rest:.3g} on all others.",
        )


def _few_places(case: CauseCase) -> None:
    """Few single tokens hold most of the gap, and the tokens around them agree."""
    tokens, left = case.tokens, case.left
    n = int(left.sum())
    if n < 500:
        return
    size = np.where(left, tokens.size, 0)
    heavy = size >= max(0.5, 20 * float(np.median(size[left])))
    rest = left & ~heavy
    if (
        heavy.sum() < 3
        or heavy.sum() > 0.01 * n
        or size[heavy].sum() < 0.25 * size.sum()
        or case.mean(rest) > AGREE_MEAN
    ):
        return
    rows = np.zeros(len(tokens.rows), np.bool_)
    rows[tokens.row[heavy]] = True
    heavy_rows = tokens.per_row(heavy.astype(np.float32))[rows]
    around = case.mean(rest & rows[tokens.row])
    crowded = heavy_rows.max() > 0.1 * max(np.diff(tokens.starts)[rows].max(), 1) and heavy_rows.max() > 3
    if around <= 2 * max(case.mean(rest), 0.005) and not crowded and is_stationary(case, heavy):
        case.name(
            "heavy_tokens", heavy,
            f"{counted_things(int(heavy.sum()), 'token')} of {n:,} hold {size[heavy].sum() / size.sum():.0%} of the "
            f"gap, each "
            f"with a difference of at least {size[heavy].min():.3g}; on all others the mean is {case.mean(rest):.3g}.",
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
    found: Mask = np.cumsum(edges[:-1]) > 0
    return found


PLACE_RULES: tuple[Callable[[CauseCase], None], ...] = (
    _row_retokenized, _placeholder, _columns_shifted, _routing_repeated, _mixed_versions, _near_context_limit,
    _heavy_tokens,
)
"""In the order in which they look; what one explains, the next does not see."""
