"""Rules that find a cause at some places of a run: in certain rows, at certain offsets, on certain tokens."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.cause_case import AGREE_MEAN, MIN_TOKENS, CauseCase, counted_things, is_stationary
from rollout_inspector.diagnose.gap.tokens import GapTokens, values_at
from rollout_inspector.streams.trajectory import Mask

LAGS = (1, -1, 2, -2)  # Shifts of a column that are looked for, in tokens.
MIN_ZEROS = 4  # Values of exactly 0.0 in a row that may be placeholders.
# Thresholds; of d and of log-probabilities in nats. They were mended on the causes that tests.measure.gap_causes plants
# with seeds 0 to 3, and measured on other seeds: docs/benchmarks-faults.md, "Causes of a gap".
IMPROBABLE, IMPROBABLE_REST, IMPROBABLE_EACH = 0.7, 0.2, 0.02
"""A stretch of zeros is a placeholder where the other side has one token at most at exp(-0.7), about one half. The
others together are at most at exp(-0.2), and exp(-0.02) for each token of the stretch."""
IMPROBABLE_RUN = 3.0
"""... and has the tokens of all such stretches together at most at exp(-3), 5 percent: they are not certain."""
UNLIKELY, UNLIKELY_EACH = 0.05, 0.01
"""Where a run has placeholders, others of its stretches count from exp(-0.05) and exp(-0.01) for each token on."""
TELLS, TELLING_TOKENS, FITTING = 0.3, 6, 0.85
"""A row is shifted where, of at least 6 pairs with an absolute d above 0.3, 85 percent fit with the column moved."""
TELLS_KNOWN, TELLING_TOKENS_KNOWN, FITTING_KNOWN = 0.1, 1, 0.7  # The same once the shift is known from other rows.
BETTER, BETTER_TOKENS = 0.6, 12
"""... or where the move leaves this part of d, over 12 pairs: another cause lies over the shift."""
FITS = 0.25  # A pair of tokens fits where moving the column leaves this part of d.
OTHER_SHIFTS = 1.25
"""The rows that fit any shift are at most so many times those that fit the best one: noise fits all alike."""
REPEATS, REPEATS_MUCH = 0.05, 0.5
"""A row repeats its routing from this share on; where every row repeats so much as the second, all of them do."""
NEAR_MEAN, NEAR_WIDE = 0.05, 0.1
"""Near the context limit the mean absolute d is above the first, and so is this share of the tokens there."""
NEAR_TIMES, NEAR_TIMES_GUESSED, NEAR_TIMES_ROW = 4, 6, 3
"""The mean there over that of all others: where the limit is known, where it is guessed, and within the same rows."""
FIRST_TIMES, FIRST_WIDE = 8, 0.5
"""The mean of first tokens over that of all others, and the share of them that disagree."""
HEAVY = "heavy_tokens"
HEAVY_ID, HEAVY_ID_TIMES = 0.2, 8  # The mean absolute d of a heavy id, and of all heavy ids over all others.
HEAVY_IDS_GAP, HEAVY_IDS_TOKENS = 0.5, 0.1
"""Heavy ids hold this share of the gap at least, and this share of the tokens at most."""
HEAVY_PLACE, HEAVY_PLACE_TIMES = 0.5, 20  # The absolute d of a heavy token at least, and its quotient over the median.
HEAVY_PLACES_GAP, HEAVY_PLACES_TOKENS, CROWDED = 0.25, 0.01, 0.1
"""Heavy tokens hold this share of the gap at least, this share of all tokens at most, and of the longest row's."""
WORKER_TIMES, WORKERS_APART = 4.0, 1 / 3
"""The gap of a bad worker over that of all others, by their uncertainty; bad ones are this share at most."""
NEAR_START = 16  # Tokens at the start of a completion, where a leak of another sequence weighs most.
HEAVY_BEHIND, HEAVY_ID_FAR, HEAVY_ID_TOKENS = 0.15, 0.8, 6
"""Behind another cause heavy tokens hold this share of the differences. Of an id this share of its tokens is heavy, and
so many are needed."""
SURPRISES = (10 ** np.arange(-3.5, 1.2, 0.5)).astype(np.float32)  # Bounds of bins by the surprise, in nats.
CALM = 0.005  # The mean absolute d around heavy tokens counts as that of any token up to twice this.
RETOKENIZED = "row_not_sampled"  # The kind of the finding that says that the ids of a row differ from what was sampled.


def _row_retokenized(case: CauseCase) -> None:
    tokens = case.tokens
    is_retokenized = np.array([RETOKENIZED in row.kinds for row in tokens.rows], np.bool_)
    if not is_retokenized.any():
        if not any(row.has_calls for row in tokens.rows):
            case.undecided["row_retokenized"] = "No row has engine calls, so nothing says which ids were sampled."
        return
    least = 2 * max(AGREE_MEAN, case.mean(case.in_rows(~is_retokenized)))
    wrong = is_retokenized & (tokens.per_row(tokens.size) >= least * np.diff(tokens.starts))
    where = case.in_rows(wrong)
    if where.any():
        case.name(
            "row_retokenized", where,
            f"{counted_things(int(wrong.sum()), 'row')} {'does' if wrong.sum() == 1 else 'do'} not hold the ids that "
            f"were sampled, and the mean difference there is {case.mean(where):.3g}. "
            "Sampler and trainer read different tokens; the finding “Row trains unsampled tokens” shows them.",
        )


def _placeholder(case: CauseCase) -> None:
    tokens = case.tokens
    columns = ("sampler", tokens.sampler, tokens.trainer), ("trainer", tokens.trainer, tokens.sampler)
    for side, values, other in columns:
        places = np.flatnonzero(case.left & (values == 0))
        if not len(places):
            continue
        rows = tokens.row[places]
        starts = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (np.diff(rows, prepend=rows[:1]) != 0))
        n, rows = np.diff(starts, append=len(places)), rows[starts]
        n_equal = np.add.reduceat(other[places], starts, dtype=np.float64)
        # Certain tokens stand together, and among them one that the other side finds improbable; top-p leaves one token
        # where it has most of the mass. That several tokens of a stretch are improbable is none of these.
        least = np.minimum.reduceat(other[places], starts)
        wrong = (n >= MIN_ZEROS) & (least <= -IMPROBABLE)
        wrong &= n_equal - least <= -np.maximum(IMPROBABLE_REST, IMPROBABLE_EACH * n)
        if n_equal[wrong].sum() <= -IMPROBABLE_RUN:
            wrong |= (n_equal <= -UNLIKELY - UNLIKELY_EACH * n) & ((n >= MIN_ZEROS) | np.isin(rows, rows[wrong]))
            where = np.zeros(len(tokens), np.bool_)
            where[places[np.repeat(wrong, n)]] = True
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
    use = np.flatnonzero(case.in_rows(looked))
    clear = {lag: _fitting_rows(tokens, use, lag, TELLS, TELLING_TOKENS, FITTING) for lag in LAGS}
    lag = max(LAGS, key=lambda one: int(clear[one].sum()))
    if not clear[lag].any() or sum(int(rows.sum()) for rows in clear.values()) > OTHER_SHIFTS * int(clear[lag].sum()):
        return
    # With the shift known, rows with fewer tokens that tell it count as well.
    use = np.flatnonzero(case.left)
    shifted = _fitting_rows(tokens, use, lag, TELLS_KNOWN, TELLING_TOKENS_KNOWN, FITTING_KNOWN)
    shifted |= _better_rows(tokens, use, lag)
    where = case.in_rows(shifted)
    mean = case.mean(where)
    first, second = _pairs(tokens, np.flatnonzero(where), abs(lag))
    source, place = (second, first) if lag > 0 else (first, second)
    moved = tokens.trainer.copy()
    moved[place] = tokens.trainer[source]
    case.name(
        "columns_shifted", where,
        f"In {counted_things(int(shifted.sum()), 'row')} the trainer's column lies {abs(lag)} "
        f"{'token' if abs(lag) == 1 else 'tokens'} {'behind' if lag > 0 else 'before'} its place, or the sampler's as "
        f"far {'before' if lag > 0 else 'behind'}: the mean difference is {mean:.3g} as it stands, and "
        f"{np.abs(moved - tokens.sampler)[place].mean(dtype=np.float64):.3g} when the column is moved back.",
    )
    # What the move leaves is a gap like that of other rows.
    case.tokens = replace(tokens, trainer=moved)
    case.left[place] = True


def _pairs(tokens: GapTokens, use: NDArray[np.int64], step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of ``use`` that lie so many tokens apart in one row, and with all between them."""
    first, second = use[:-step], use[step:]
    is_pair = (tokens.row[second] == tokens.row[first]) & (tokens.offset[second] - tokens.offset[first] == step)
    return first[is_pair], second[is_pair]


def _better_rows(tokens: GapTokens, use: NDArray[np.int64], lag: int) -> Mask:
    """The rows ``[R]`` whose d the move halves: a gap of another cause lies over the shift."""
    first, second = _pairs(tokens, use, abs(lag))
    trainer, sampler = (second, first) if lag > 0 else (first, second)
    row = tokens.row[first]
    before, after, n = (
        np.bincount(row, weights=weights, minlength=len(tokens.rows))
        for weights in (
            (tokens.size[first] + tokens.size[second]) / 2, np.abs(tokens.trainer[trainer] - tokens.sampler[sampler]),
            np.ones(len(row)),
        )
    )
    return (n >= BETTER_TOKENS) & (before > NEAR_MEAN * n) & (after <= BETTER * before)


def _fitting_rows(
    tokens: GapTokens, use: NDArray[np.int64], lag: int, least: float, n_least: int, share: float
) -> Mask:
    """The rows ``[R]`` where moving the trainer's column by ``lag`` explains d. It has to fall to a quarter in this
    share of the pairs of tokens that show at least ``least``. A row needs ``n_least`` such pairs. ``use``: places to
    look at ``[n]``."""
    before, after = _pairs(tokens, use, abs(lag))
    # Of both tokens: one heavy token at the edge of a stretch has no neighbour on one side.
    larger = np.maximum(tokens.size[before], tokens.size[after])
    trainer, sampler = (after, before) if lag > 0 else (before, after)
    misfit, row, tells = np.abs(tokens.trainer[trainer] - tokens.sampler[sampler]), tokens.row[before], larger > least
    n, fitting = (np.bincount(row[at], minlength=len(tokens.rows)) for at in (tells, tells & (misfit <= FITS * larger)))
    return (n >= n_least) & (fitting >= share * n)


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
        sentence = "All rows repeat about as much of their routing: none shows the gap without."
        case.undecided["routing_repeated"] = sentence
    mean, mean_elsewhere = case.mean(where), case.mean(others)
    if not where.any() or not case.is_apart(where & case.scope, others & case.scope):
        return
    case.name(
        "routing_repeated", where,
        f"{counted_things(int(repeated.sum()), 'row')} repeat {share[repeated].mean():.0%} of their routing, "
        f"and the mean difference there is {mean:.3g}"
        + (f"; in the other rows it is {mean_elsewhere:.3g}." if others.any() else "; no other row shows it without."),
    )


def _one_worker(case: CauseCase) -> None:
    """Rows of few workers disagree, and those of all others less by far, at every one of them."""
    tokens = case.tokens
    names = [name for name in tokens.workers if name]
    if len(names) < 2:
        sentence = "All rows come from one worker." if names else "No row names the worker that sampled it."
        case.undecided["one_worker"] = sentence
        return
    has_worker = tokens.worker >= len(tokens.workers) - len(names)
    sizes, doubts, counts = (np.bincount(tokens.worker, weights=has_worker * sums) for sums in case.row_sums())
    enough = np.flatnonzero(counts >= MIN_TOKENS)
    units = sizes[enough] / np.maximum(doubts[enough], 1e-9)
    order = np.argsort(-units)
    # The greatest step between two workers parts the bad ones from the others.
    most = int(len(enough) * WORKERS_APART) if len(enough) > 2 else 1
    steps = [units[order[n]] / max(units[order[n + 1]], 1e-9) for n in range(min(most, len(enough) - 1))]
    if not steps or max(steps) < WORKER_TIMES:
        return
    bad = enough[order[: int(np.argmax(steps)) + 1]]
    is_bad = np.isin(tokens.worker, bad)
    where, others = case.in_rows(is_bad), case.in_rows(has_worker & ~is_bad)
    if not case.is_apart(where, others, WORKER_TIMES):
        return
    listed = ", ".join(tokens.workers[int(place)] for place in bad[:4])
    case.name(
        "one_worker", where,
        f"Of {len(names)} workers, {counted_things(len(bad), 'disagrees', 'disagree')} with the trainer: {listed}. The "
        f"mean difference there is {case.mean(where):.3g}, and {case.mean(others):.3g} on the tokens of all others.",
    )


def _packing_leak(case: CauseCase) -> None:
    """Rows behind another sequence of their pack disagree, and those that stand first agree."""
    places = np.array([-1 if row.packed is None else row.packed for row in case.tokens.rows])
    if places.max() <= 0:
        case.undecided["packing_leak"] = (
            "No row says where it stands in the packed row of the trainer." if places.max() < 0 else
            "Every row stands first in its pack."
        )
        return
    first, behind = case.in_rows(places == 0), case.in_rows(places > 0)
    if min(first.sum(), behind.sum()) < MIN_TOKENS or not case.is_apart(behind, first, WORKER_TIMES):
        return
    near = behind & (case.tokens.position < NEAR_START)
    case.name(
        "packing_leak", behind,
        f"In {counted_things(int((places > 0).sum()), 'row')} that stand behind another sequence of their pack the "
        f"mean difference is {case.mean(behind):.3g}, and {case.mean(near):.3g} on the first {NEAR_START} tokens of "
        f"completions; in the first sequence of a pack it is {case.mean(first):.3g}.",
    )


def _mixed_versions(case: CauseCase) -> None:
    tokens = case.tokens
    if not (tokens.version >= 0).any():
        case.undecided["mixed_versions"] = "No policy version is recorded."
        return
    newest = tokens.newest
    # As unsigned numbers those that are not recorded come last.
    mixed = np.minimum.reduceat(tokens.version.view(np.uint32), tokens.starts[:-1]) < newest
    if not mixed.any():
        return
    of_mixed = case.in_rows(mixed)
    newest = tokens.of_rows(newest)
    old = of_mixed & (tokens.version < newest) & (tokens.version >= 0)
    new = of_mixed & (tokens.version == newest)
    mean, mean_new = case.mean(old), case.mean(new)
    if old.sum() >= MIN_TOKENS and case.is_apart(old, new):
        case.name(
            "mixed_versions", old,
            f"{counted_things(int(mixed.sum()), 'row')} hold tokens of several policy versions. On tokens of an older "
            f"version the mean difference is {mean:.3g}, on those of the newest {mean_new:.3g}.",
        )


def _near_context_limit(case: CauseCase) -> None:
    tokens = case.tokens
    lengths = np.array([row.length for row in tokens.rows])
    cut = np.array([bool(row.is_cut) for row in tokens.rows], np.bool_)
    limit = int(lengths[cut].max() if cut.any() else lengths.max())
    is_known = bool(cut.any()) or int((lengths == limit).sum()) >= 2
    if limit < 64:
        return
    best: tuple[Mask, float, float, int] | None = None
    for part in (32, 16, 8):
        window = max(MIN_TOKENS, limit // part)
        whole = case.left & (tokens.offset >= limit - window)
        near = whole & case.scope
        of_rows = np.logical_or.reduceat(near, tokens.starts[:-1])
        if near.sum() < MIN_TOKENS or of_rows.sum() < (1 if is_known else 3) or (mean := case.mean(near)) <= NEAR_MEAN:
            continue
        elsewhere = case.left & case.scope & ~near
        same = elsewhere & tokens.of_rows(of_rows)
        mean_elsewhere, mean_before = case.mean(elsewhere), case.mean(same)
        # Not a few heavy tokens that happen to stand there.
        wide = int((near & (tokens.size > NEAR_MEAN)).sum())
        is_clear = mean >= (NEAR_TIMES if is_known else NEAR_TIMES_GUESSED) * mean_elsewhere
        is_clear &= not same.any() or mean >= NEAR_TIMES_ROW * mean_before
        is_clear &= wide >= max(8, NEAR_WIDE * int(near.sum()))
        if not elsewhere.any() or not is_clear or (best is not None and mean < best[1] / 2):
            continue
        best = whole, mean, mean_elsewhere, window
    if best is not None:
        near, mean, mean_elsewhere, window = best
        reason = "rows that were cut by their length end there" if cut.any() else "the longest rows end there"
        case.name(
            "near_context_limit", near,
            f"On the last {window:,} tokens before offset {limit:,} ({reason}) the mean difference is {mean:.3g}, on "
            f"all others {mean_elsewhere:.3g}.",
        )


def _first_token(case: CauseCase) -> None:
    """The first tokens of completions disagree, all of them or those of the first turn, and the others agree."""
    tokens, firsts = case.tokens, case.left & (case.tokens.position == 0)
    for first, what in ((firsts, "a completion"), (firsts & (tokens.turn == 0), "a row's first completion")):
        others, mean = case.left & ~first, case.mean(first)
        wide = int((first & (tokens.size > NEAR_MEAN)).sum())
        if (
            first.sum() >= MIN_TOKENS and mean > NEAR_MEAN and wide >= FIRST_WIDE * int(first.sum())
            and (mean_elsewhere := case.mean(others)) <= min(mean / FIRST_TIMES, AGREE_MEAN)
            and case.is_apart(first, others)
            and is_stationary(case, first, first)
        ):
            case.name(
                "first_token", first,
                f"On the first token of {what} the mean difference is {mean:.3g}, on all others {mean_elsewhere:.3g}.",
            )
            return


def _few_ids(case: CauseCase) -> None:
    """Few token ids hold most of the gap, in all steps alike."""
    tokens, unexplained = case.tokens, case.left
    has_id = unexplained & (tokens.ids >= 0)
    sums, counts = tokens.sums_of_ids if has_id.all() else tokens.by_id(has_id)
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
            HEAVY, where,
            f"The token {'id' if len(top) == 1 else 'ids'} {names} ({counts[top].sum() / n:.2%} of the tokens) hold "
            f"{sums[top].sum() / sums.sum():.0%} of the gap: {mean:.3g} on the mean, and {mean_elsewhere:.3g} on all "
            "others.",
        )


def _few_places(case: CauseCase) -> None:
    """Few single tokens hold most of the gap, and the tokens around them agree."""
    tokens, unexplained = case.tokens, case.left
    n = int(unexplained.sum())
    size = tokens.size if n == len(tokens) else np.where(unexplained, tokens.size, 0)
    if n < 500 or np.count_nonzero(size >= HEAVY_PLACE) < 3 or any(cause.cause == HEAVY for cause in case.causes):
        return
    heavy = size >= max(HEAVY_PLACE, HEAVY_PLACE_TIMES * float(np.median(values_at(size, unexplained))))
    others = unexplained & ~heavy
    is_share = 3 <= heavy.sum() <= HEAVY_PLACES_TOKENS * n and size[heavy].sum() >= HEAVY_PLACES_GAP * size.sum()
    if not is_share or case.mean(others) > AGREE_MEAN:
        return
    n_heavy = tokens.per_row(heavy)
    rows = n_heavy > 0
    around = case.mean(others & tokens.of_rows(rows))
    crowded = n_heavy.max() > max(CROWDED * np.diff(tokens.starts)[rows].max(), 3)
    if around <= 2 * max(case.mean(others), CALM) and not crowded and is_stationary(case, heavy):
        case.name(
            HEAVY, heavy,
            f"{counted_things(int(heavy.sum()), 'token')} of {n:,} hold {size[heavy].sum() / size.sum():.0%} of the "
            f"gap, each with a difference of at least {size[heavy].min():.3g}; on all others the mean is "
            f"{case.mean(others):.3g}.",
        )


def heavy_behind(case: CauseCase) -> None:
    """Ids or single tokens that lie far from others of the same surprise, where a cause of all tokens covers them.
    Looks in the steps that agree best. Tokens are compared with others of the same surprise to the side that finds them
    likelier, because a temperature moves these alike."""
    tokens, looked = case.tokens, case.left & case.scope
    if looked.sum() < 500 or any(cause.cause == HEAVY for cause in case.causes):
        return
    logprobs = values_at(np.maximum(tokens.sampler, tokens.trainer), looked)
    bins = sum((logprobs < -bound for bound in SURPRISES), np.zeros(len(logprobs), np.uint8))
    order, n_of_bin = np.argsort(bins, kind="stable"), np.bincount(bins)
    off = values_at(tokens.d, looked)[order]
    parts = [part for part in np.split(off, np.cumsum(n_of_bin)[:-1]) if len(part)]
    for part in parts:
        part -= np.median(part)
    size = np.abs(off)
    if np.count_nonzero(size >= HEAVY_PLACE) < 3:
        return
    spreads = [max(float(np.median(np.abs(part))), CALM / 5) for part in parts]
    spread = np.repeat(spreads, n_of_bin[n_of_bin > 0])
    is_far = (size >= HEAVY_PLACE) & (size >= HEAVY_PLACE_TIMES * spread)
    is_near = (size >= HEAVY_ID) & (size >= HEAVY_PLACE_TIMES * HEAVY_ID / HEAVY_PLACE * spread) & ~is_far
    # That all tokens of an id lie far off to one side is no chance, also where others spread.
    is_off = (size >= HEAVY_PLACE) & (size >= HEAVY_ID_TIMES / 2 * spread)
    ids = np.maximum(values_at(tokens.ids, looked)[order], 0)
    n_off, n = np.abs(np.bincount(ids, weights=is_off * np.sign(off))), np.bincount(ids)
    heavy_ids = np.flatnonzero((n >= HEAVY_ID_TOKENS) & (n_off >= HEAVY_ID_FAR * n))
    of_ids = n_off[heavy_ids].sum()
    are_ids = 0 < len(heavy_ids) <= 3 and of_ids >= HEAVY_ID_FAR * is_far.sum()
    if are_ids:
        is_far |= is_off & np.isin(ids, heavy_ids)
    places, share = np.flatnonzero(looked)[order[is_far]], size[is_far].sum() / size.sum(dtype=np.float64)
    if len(places) < 3 or share < HEAVY_BEHIND:
        return
    where = np.zeros(len(tokens), np.bool_)
    where[places] = True
    if are_ids:
        where |= case.left & np.isin(tokens.ids, heavy_ids)
        names = ", ".join(map(str, heavy_ids.tolist()))
        what = f"nearly all of {'id' if len(heavy_ids) == 1 else 'ids'} {names}"
    elif (
        is_near.sum() <= is_far.sum() / 2 and is_far.mean() <= HEAVY_PLACES_TOKENS
        and np.bincount(tokens.row[places]).max() <= 3
    ):
        what = "alone in their rows"
    else:
        return
    case.name(
        HEAVY, where,
        f"{counted_things(int(is_far.sum()), 'token')}, {what}, lie {HEAVY_PLACE} or more from others of the same "
        f"probability, and hold {share:.0%} of what these differ by. Seen in the training steps that agree best: "
        "another cause covers them elsewhere.",
    )


PLACE_RULES: tuple[Callable[[CauseCase], None], ...] = (
    _row_retokenized, _placeholder, _columns_shifted, _routing_repeated, _one_worker, _packing_leak, _mixed_versions,
    _near_context_limit, _first_token, _few_ids, _few_places,
)
"""In the order in which they look; what one explains, the next does not see."""
OF_SCOPE = (_routing_repeated, _near_context_limit)  # Those that decide by :attr:`CauseCase.scope`.
