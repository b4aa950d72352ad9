"""Rules that find a cause in all that is left of a run: how the gap moves with the log-probability and with updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.cause_case import (
    AGREE_MEAN, FINE, MIN_STEPS, MIN_TOKENS, CauseCase, counted_things, high_quantile, is_stationary, means_of
)
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollout_inspector.diagnose.gap.figures import BLOCK
from rollout_inspector.diagnose.gap.place_rules import HEAVY
from rollout_inspector.diagnose.gap.tokens import BITS, CONFIDENT, GapTokens, values_at
from rollout_inspector.streams.trajectory import Mask

_CLEAR = 3.0  # One mean is clearly above another: by this factor.
OF_UPDATES = ("stale_cache", "weights_not_delivered", "weights_rounded_away")
"""Causes that begin with an update of the weights."""
MANY_STEPS = 8  # Steps from which on a slow trend is trusted.
FEW_TOKENS = 200  # Where steps have fewer tokens, some steps are read together.
# Thresholds; of d and of log-probabilities in nats. They were mended on the causes that tests.measure.gap_causes plants
# with seeds 0 to 3, and measured on other seeds: docs/benchmarks-faults.md, "Causes of a gap".
AGREE_UNIT = 0.12  # The absolute d over the uncertainty of tokens that kernels of bfloat16 make at most.
LINE_FIT, LINE_SLOPE = 0.25, 0.05  # The r² and the slope from which on d follows the mean of both log-probabilities.
SHARPER, SHARPER_FIT, SHARPER_SLOPE = 0.85, 0.06, 0.03
"""... and where likely tokens move one way: the part of their absolute d that has one sign."""
QUIET_MEAN, QUIET_UNIT, QUIET_RATIO, QUIET_SIDE, QUIET_ROWS = 0.06, 0.1, 0.01, 0.1, 2.0
"""Noise of FP8: the mean absolute d, the same over the uncertainty, the mean importance ratio off 1, the part of one
sign, and rows over the median."""
LINE_EARLY, LINE_SIGN = 0.35, 0.9
"""The first third of the steps has at least this part of the slope, and steps of this weight have its sign."""
SLOPES_GROW = 1.6
"""The last third of the steps has so many times the slope of the first one, in order: it grows with training."""
ONE_SIDED = 0.004  # The absolute mean of d from which on one side may lack mass.
NOISE, BEYOND_NOISE = 0.99, 1.2
"""This quantile of the minor sign, so many times, is what noise explains of the major one."""
MINORITY, FULL, BOUND = 0.03, 0.999, 3.0
"""Beyond the noise the minor sign has this share at most. This quantile of the major one is at most 3: top-p leaves at
least exp(-3), 5 percent, of the mass."""
CHANCE = 5  # Standard errors by which the mean importance ratio differs from 1.
RISES, RISES_SLOWLY = 1.4, 1.5
"""The last third over the first at least, and over the first tenth where the growth is slow."""
ORDERED, ORDERED_SLOWLY, ORDERED_BY_FAR, BY_FAR = 0.7, 0.9, 0.5, 30
"""The rank correlation of growth, of slow growth, and of growth to more than 30 times the beginning."""
PART_ROWS, MIN_PART_ROWS, PART_TIMES, PART_APART = 0.1, 12, 2.0, 4.0
"""The rows of the last third are put in the order of their gaps and parted where one gap is widest above the one below.
Each part has this share of the rows at least; so many rows are needed; the quotient at that place; and that of both
parts."""
OTHER_TOKENS, OTHER_SHARE, OTHER_ROWS, OTHER_REST = 2, 0.05, 0.5, 0.002
"""A row was read with other inputs where so many tokens, and this share of the sure ones, are confident disagreements.
Of the rows this share at most, and of the sure tokens of all others this share."""
JUMP_BEFORE, JUMP_ROWS, JUMP_FRESH = 2.0, 0.8, 4
"""Before a jump no step has more than so many times the gap of another one. Behind it this share of the rows has as
much more than the median row before it. So many rows with a new prompt are needed."""
ADVANCES = 0.8  # Of the training steps this share brings a newer version: the engine takes the updates.
LEVEL = 0.5  # After a jump, a rank correlation below this is no growth.


def _temperature(case: CauseCase) -> None:
    """One side is sharper: its likely tokens are more likely, and all others less.

    With ``p`` at least 1/2 a token gains by each temperature below 1, whatever the other tokens are, and loses by each
    above. Both sides are whole distributions, and the tokens were drawn from one of them: the mean of ``exp(d)`` or of
    ``exp(-d)`` is 1. Noise and other weights move likely tokens both ways; top-p moves all tokens one way.
    """
    tokens, unexplained = case.tokens, case.left
    if unexplained.sum() < 4 * MIN_TOKENS or case.mean(unexplained) <= AGREE_MEAN / 2:
        return
    if _denies_the_sure(case):
        return  # no temperature that is in use makes one half a fourteenth
    sampler, trainer, d = (values_at(of, unexplained) for of in (tokens.sampler, tokens.trainer, tokens.d))
    slope, fit = _regression((sampler + trainer) / np.float32(2), d)
    temperatures = sorted({row.temperature for row in tokens.rows if row.temperature is not None})
    least = 0.5 if temperatures and temperatures != [1.0] else 1.0  # a recorded temperature makes it likelier
    if fit < least * SHARPER_FIT or abs(slope) < least * SHARPER_SLOPE:
        return
    d = d.astype(np.float64)
    chance = _off_whole(d), _off_whole(-d)
    if min(chance) >= CHANCE:
        return
    likely = np.maximum(sampler, trainer) >= math.log(0.5)
    total, size = float(d[likely].sum()), float(np.abs(d[likely]).sum())
    is_sharper = (
        likely.sum() >= MIN_TOKENS and abs(total) >= SHARPER * size and total * slope > 0
        and (np.sign(d[~likely]) * np.expm1(np.abs(d[~likely]))).sum() * total < 0
    )
    if not is_sharper and (fit < least * LINE_FIT or abs(slope) < least * LINE_SLOPE):
        return
    slopes, spreads = _slopes(case)
    third = max(len(slopes) // 3, 1)
    if len(slopes) >= MIN_STEPS and np.average(slopes[:third], weights=spreads[:third]) / slope < LINE_EARLY:
        return  # it grows with training: no setting does that
    sizes = np.abs(slopes)
    is_rising = len(sizes) >= 2 * MANY_STEPS and sizes[-third:].mean() >= SLOPES_GROW * sizes[:third].mean()
    if is_rising and _rank_correlation(sizes) >= ORDERED:
        return
    if (updates := _updates_of(tokens)) is not None and _trend(case, updates).grows():
        return
    if len(slopes) and np.average(np.sign(slopes) == math.copysign(1, slope), weights=spreads) < LINE_SIGN:
        return
    sharp, other = ("trainer", "sampler") if slope > 0 else ("sampler", "trainer")
    whose = ""
    if max(chance) >= CHANCE:
        whose = " The tokens follow the distribution of the " + (
            "sampler: the trainer has another temperature." if chance[0] < chance[1] else
            "trainer: the engine reports log-probabilities from before its temperature."
        )
    listed = ", ".join(f"{temperature:g}" for temperature in temperatures[:3])
    recorded = f" The engine calls record temperature {listed}." if listed else ""
    case.name(
        "temperature", unexplained.copy(),
        f"Likely tokens are likelier to the {sharp} than to the {other}, and unlikely ones less likely "
        f"(r² = {fit:.2f}), as when one side divides its logits by a temperature and the other does not."
        f"{whose}{recorded}",
    )


def _off_whole(d: NDArray[np.float64]) -> float:
    """Standard errors by which the mean of ``exp(d)`` differs from 1: where the tokens of a whole distribution were
    drawn from another one, it is 1 up to chance."""
    ratio = np.exp(np.minimum(d, 20.0))
    return abs(float(ratio.mean()) - 1) / (float(ratio.std()) / math.sqrt(len(d)) + AGREE_MEAN / CHANCE / 10)


def _top_p_renormalised(case: CauseCase) -> None:
    tokens, unexplained = case.tokens, case.left
    d = values_at(tokens.d, unexplained)
    mean = float(d.mean(dtype=np.float64)) if len(d) else 0.0
    if tokens.kept_mass is not None:
        kept_mass = values_at(tokens.kept_mass, unexplained)
        other, masses = (float(np.abs(values).mean()) for values in (d - kept_mass, kept_mass)) if len(d) else (0, 0)
        if masses > AGREE_MEAN >= other:
            case.name("top_p_renormalised", unexplained.copy(), f"The logarithm of the kept mass is {masses:.3g} on "
                      f"the mean. Where the trainer's values are divided by that mass, too, {other:.2g} is left.")
        return
    if abs(mean) < ONE_SIDED:
        return
    # Kernels differ to both sides. What lies beyond nearly all that is on the minor side is not their noise.
    sides = np.abs(d[d > 0]), np.abs(d[d < 0])
    minor, major = sides if mean < 0 else sides[::-1]
    limit = max(AGREE_MEAN, BEYOND_NOISE * float(np.quantile(minor, NOISE)) if len(minor) > MIN_TOKENS else 0.0)
    beyond = int((major > limit).sum())
    minority = int((minor > limit).sum()) / max(beyond, 1)
    if beyond < 2 * MIN_TOKENS or minority > MINORITY or (most := float(np.quantile(major, FULL))) > BOUND:
        return
    ratio = float(np.exp(d.astype(np.float64)).mean())
    if min(_off_whole(d.astype(np.float64)), _off_whole(-d.astype(np.float64))) < CHANCE:
        return  # both distributions are whole
    if not is_stationary(case, unexplained):
        return
    top_ps = sorted({row.top_p for row in tokens.rows if row.top_p is not None})
    recorded = f" The engine calls record top_p {', '.join(f'{top_p:g}' for top_p in top_ps[:3])}." if top_ps else ""
    side = "sampler" if mean < 0 else "trainer"
    case.name(
        "top_p_renormalised", unexplained.copy(),
        f"{1 - minority:.1%} of the differences above {limit:.2g} have one sign, 1 of 1,000 is beyond "
        f"{most:.2g}, and the mean importance ratio is {ratio:.3f}, not 1: the {side} divides by the mass that "
        f"top-p or top-k leaves.{recorded}",
    )


def _over_updates(case: CauseCase) -> None:
    """A stale cache, or weights that were not delivered: both begin with the first update."""
    if hiding := [cause.cause for cause in case.causes if cause.cause in ("temperature", "top_p_renormalised")]:
        sentence = f"The gap of “{CAUSES[hiding[0]].title}” lies over all tokens and hides it. Mend that first."
        case.undecided.update(dict.fromkeys(OF_UPDATES, sentence))
        return
    rows = _updates_of(case.tokens)
    lost, why = _lost_or_rounded(case.tokens)
    is_rounded = lost == "weights_rounded_away"
    if rows is None:
        steps = case.tokens.step_of_row
        sentence = "There is 1 step, and a trend needs 4." if steps.min() >= 0 else (
            "No training step and no policy version is recorded.")
        case.undecided.update(dict.fromkeys(OF_UPDATES, sentence))
        wrong = _confident_rows(case)[0]
        if is_rounded and steps.min() > 0 and _denies_the_sure(case) and (wrong > 0).mean() >= OTHER_ROWS:
            case.name(
                lost, case.left.copy(),
                f"The trainer gives {int(wrong.sum()):,} tokens 2 nats less that the sampler found likely, in "
                f"{int((wrong > 0).sum()):,} of {len(wrong):,} rows.{why}",
            )
        return
    seen_before = _seen_before(case.tokens, rows)
    if _stale_cache(case, seen_before, rows):
        return
    trend = _trend(case, rows)
    later = case.in_rows((rows > trend.steps[0]) & ~seen_before) if len(trend.steps) else case.left
    if trend.grows():
        case.name(
            lost, case.left.copy(),
            f"The mean difference is {trend.means[:2].mean():.3g} at the first steps and {trend.means[-2:].mean():.3g} "
            f"at the last. Divided by the tokens' uncertainty (1 − probability) it grows with the step (rank "
            f"correlation {_rank_correlation(trend.units):.2f}) and never falls back: the sampler stays where it was "
            f"while the trainer moves on.{why}",
            _first_above(case, trend),
        )
        if not later.any():
            case.undecided["stale_cache"] = "Every prompt was seen under an earlier policy, so none shows a cold cache."
    elif len(trend.steps) >= MIN_STEPS and not later.any() and trend.jumps():
        case.name(
            "stale_cache", case.in_rows(seen_before),
            f"The mean difference is {trend.means[0]:.3g} before the first update, jumps to "
            f"{trend.means[1:].mean():.3g} after it and does not grow, and every later prompt was seen under an "
            "earlier policy.",
            _first_above(case, trend),
        )
    elif (at := _jump(case, trend, rows, seen_before, is_rounded)) is not None:
        before, behind = case.in_rows(rows < trend.parts[at]), case.in_rows(rows >= trend.parts[at])
        case.name(
            lost, behind,
            f"Before step {trend.parts[at]:,} the mean difference is {case.mean(before):.3g}, from it on "
            f"{case.mean(behind):.3g}, in all rows alike and at new prompts too: an update changed the trainer and not "
            f"the sampler.{why}",
            int(trend.parts[at]) if case.tokens.step_of_row.min() >= 0 else None,
        )
        # Few tokens that lie far off since the same step are the tail of the same update.
        tail = HEAVY, case.causes[-1].from_step
        case.causes = [cause for cause in case.causes if (cause.cause, cause.from_step) != tail]
    elif len(trend.steps) < MIN_STEPS:
        n_steps = counted_things(len(trend.steps), "step")
        sentence = f"There {'is' if len(trend.steps) == 1 else 'are'} {n_steps}, and a trend needs {MIN_STEPS}."
        case.undecided.update(weights_not_delivered=sentence, weights_rounded_away=sentence)
    if not why:
        case.undecided.setdefault(
            "weights_rounded_away",
            "Neither the precision of both sides nor a version for each training step is recorded: an update that was "
            "rounded away looks as if it had not been delivered.",
        )


def _lost_or_rounded(tokens: GapTokens) -> tuple[str, str]:
    """Which cause an update has that does not show in the engine, and a sentence of what says so; empty = nothing. The
    engine names a new version at each training step, so it took the update; or its precision is coarser than the
    trainer's. Where both hold weights alike, or the version stays, the update did not arrive."""
    steps, advances = tokens.step_of_row, -1.0  # not known
    if steps.min() >= 0 and (tokens.version >= 0).all():
        newest = means_of(steps, tokens.newest.astype(np.float64), np.ones(len(steps)))[1]
        advances = float((np.diff(newest) > 0).mean()) if len(newest) > 1 else -1.0
    if 0 <= advances < ADVANCES:
        return "weights_not_delivered", " The version that the engine names stays behind the training steps."
    (sampler, trainer), *more = {row.precisions for row in tokens.rows}
    if sampler and trainer and not more:
        bits = [BITS.get(name.partition("_")[0], least) for name, least in ((sampler, 99), (trainer, 0))]
        if bits[0] < bits[1]:
            return "weights_rounded_away", f" The sampler holds weights in {sampler}, the trainer in {trainer}."
        return "weights_not_delivered", f" Both hold weights alike ({sampler}, {trainer}), so nothing is rounded away."
    if advances >= 0:
        return "weights_rounded_away", " The engine names a newer version at each training step, so the update arrived."
    return "weights_not_delivered", ""


def _jump(case: CauseCase, trend: Trend, rows: NDArray[np.int64], seen: Mask, may_fall: bool) -> int | None:
    """From which part on all rows disagree that agreed before, of the last three; None = none. ``may_fall``: from any
    part on, and later ones may fall: what was rounded away arrives when enough has gathered."""
    units = trend.units
    high = units > PART_APART * units.min(initial=np.inf)
    if not high.any():
        return None
    at = int(np.argmax(high)) if may_fall else int(np.flatnonzero(~high)[-1]) + 1
    if not at or not 0 < len(units) - at <= (len(units) if may_fall else MIN_STEPS - 1):
        return None
    early = rows < trend.parts[at]
    before, behind = case.in_rows(early), case.in_rows(~early)
    if case.mean(before) > AGREE_MEAN or not case.is_apart(behind, before, PART_APART):
        return None
    sums, doubts, _ = case.row_sums()
    each = sums / np.maximum(doubts, 1e-9)
    fresh = each[~early & ~seen & (doubts > 0)]
    is_wide = len(fresh) >= JUMP_FRESH and (fresh >= JUMP_BEFORE * np.median(each[early & (doubts > 0)])).mean()
    is_even = units[:at].max() <= JUMP_BEFORE * units[:at].min()
    return at if is_even and is_wide >= (OTHER_ROWS if may_fall else JUMP_ROWS) else None


def _stale_cache(case: CauseCase, seen: Mask, rows: NDArray[np.int64]) -> bool:
    if not seen.any():
        case.undecided["stale_cache"] = "No prompt comes again under a later policy, and no cached prefix is recorded."
        return False
    stale, fresh = case.in_rows(seen), case.in_rows(~seen & (rows > rows.min()))
    if fresh.sum() < MIN_TOKENS:
        fresh = case.in_rows(~seen)
    if stale.sum() < MIN_TOKENS or fresh.sum() < MIN_TOKENS:
        return False
    mean, mean_fresh = case.mean(stale), case.mean(fresh)
    if not case.is_apart(stale, fresh, _CLEAR) or mean_fresh > 2 * AGREE_MEAN:
        return False
    if (rows[~seen] == rows.min()).all():
        trend = _trend(case, rows)
        if len(trend.steps) < 2 or trend.grows():
            return False  # nothing is fresh after the first update: the trend decides
    case.name(
        "stale_cache", stale,
        f"Where the prompt was seen under an earlier policy the mean difference is {mean:.3g}, where it was new it is "
        f"{mean_fresh:.3g}: the prefix cache holds values of older weights.",
    )
    return True


def _in_a_part_of_the_rows(case: CauseCase) -> None:
    """A setting or weights of one engine of several: some rows of each step disagree, and all others far less."""
    tokens, steps = case.tokens, case.tokens.step_of_row
    if not len(steps) or steps.min() < 0 or case.agrees():
        return
    sums, doubts, _ = case.row_sums()
    units = sums / np.maximum(doubts, 1e-9)
    late = np.sort(units[(doubts > 0) & (steps >= np.quantile(steps, 2 / 3))])
    least, most = int(PART_ROWS * len(late)), len(late) - int(PART_ROWS * len(late))
    if most - least < MIN_PART_ROWS:
        return
    times = late[least + 1 : most] / np.maximum(late[least : most - 1], 1e-9)
    if times.max() < PART_TIMES:
        return
    at = least + int(np.argmax(times))
    share = 1 - (at + 1) / len(late)
    chosen = units > min(PART_TIMES * late[at], (late[at] + late[at + 1]) / 2)
    # Before it shows, nothing tells these rows from others: as many as later stand for them.
    for step in np.unique(steps[steps < steps[chosen].min()]):
        here = np.flatnonzero((steps == step) & (doubts > 0))
        chosen[here[np.argsort(-units[here])][: max(round(share * len(here)), 1)]] = True
    part = CauseCase(tokens)
    part.left = case.in_rows(chosen)
    agreeing = case.left & ~part.left
    if case.per_uncertainty(part.left) < PART_APART * case.per_uncertainty(agreeing):
        return
    for rule in (_top_p_renormalised, _temperature, _over_updates):
        rule(part)
    above = case.in_rows((units > math.sqrt(late[at] * late[at + 1])) | chosen)
    for cause in part.causes[:1]:
        evidence = f"In about {share:.0%} of the rows of each step; all others have {case.mean(agreeing):.3g}. "
        case.name(cause.cause, above, evidence + cause.evidence, cause.from_step)


def _other_inputs(case: CauseCase) -> None:
    """In few rows the trainer finds what the sampler is sure of improbable, and in all others it agrees: other weights
    or kernels would move all rows."""
    tokens, sure = case.tokens, case.left & (case.tokens.sampler >= CONFIDENT)
    wrong, is_other = _confident_rows(case)
    if not is_other.any():
        return
    sums, doubts, _ = case.row_sums()
    units, has_tokens = sums / np.maximum(doubts, 1e-9), doubts > 0
    # With some rows known, others count that disagree about as much.
    least = max(np.median(units[is_other]) / 3, PART_APART * np.median(units[has_tokens]))
    is_other |= has_tokens & (units >= least)
    where, agreeing, n_rows = case.in_rows(is_other), case.in_rows(~is_other), int(has_tokens.sum())
    if is_other.sum() > OTHER_ROWS * n_rows or where.sum() < MIN_TOKENS:
        return
    n_wrong = int((tokens.confident & agreeing).sum())
    if n_wrong > OTHER_REST * max(int((sure & agreeing).sum()), 1) or not case.is_apart(where, agreeing, PART_APART):
        return
    updates = _updates_of(tokens)
    if not is_stationary(case, where) or (updates is not None and _seen_before(tokens, updates)[is_other].all()):
        return  # training makes it, or a cache of older weights may
    case.name(
        "other_inputs", where,
        f"In {counted_things(int(is_other.sum()), 'row')} of {n_rows:,} the trainer gives "
        f"{int(wrong[is_other].sum()):,} tokens 2 nats less that the sampler found likely, and the mean difference is "
        f"{case.mean(where):.3g}. In all others it is {case.mean(agreeing):.3g}: the weights are the same, the tokens "
        "before are not.",
    )


def _confident_rows(case: CauseCase) -> tuple[NDArray[np.float64], Mask]:
    """The confident disagreements of each row, and the rows where they are too many for chance, both ``[R]``."""
    n_sure = case.tokens.per_row(case.left & (case.tokens.sampler >= CONFIDENT))
    wrong = case.tokens.per_row(case.tokens.confident, case.left)
    return wrong, wrong >= np.maximum(OTHER_TOKENS, OTHER_SHARE * n_sure)


def _denies_the_sure(case: CauseCase) -> bool:
    """Whether the trainer denies so many tokens that the sampler is sure of that only other weights or inputs do."""
    n_sure = int((case.left & (case.tokens.sampler >= CONFIDENT)).sum())
    return bool((case.tokens.confident & case.left).sum() >= max(4 * OTHER_TOKENS, OTHER_SHARE * n_sure))


def _unexplained(case: CauseCase) -> None:
    if case.agrees() or case.left.sum() < 4:
        return
    unexplained = case.left.copy()
    if not case.causes and _is_noise(case):
        case.undecided["unexplained"] = (
            f"The mean difference is {case.mean(unexplained):.3g}, to both sides, in all rows and from the first "
            "step on: kernels of low precision (FP8) make as much. No cause is looked for behind it."
        )
        return
    if any(row.top_p is not None and row.top_p < 1 for row in case.tokens.rows) and case.tokens.kept_mass is None:
        case.undecided["top_p_renormalised"] = (
            "It would need the mass of the kept tokens: kept_logprob_mass, or the ids of the kept sets and a score by "
            "an engine that sums them, as the transformers engine does."
        )
    also = "No other cause explains the rest: its" if case.causes else "No rule names a cause. The"
    case.name(
        "unexplained", unexplained,
        f"{also} mean difference is {case.mean(unexplained):.3g} over {int(unexplained.sum()):,} tokens, and 1 % "
        f"of them are beyond {high_quantile(values_at(case.tokens.size, unexplained), 0.99):.3g}.",
    )


def _is_noise(case: CauseCase) -> bool:
    """Whether what is left is as kernels of low precision make it: small, to both sides, alike in all rows."""
    if case.left.sum() < 4 * MIN_TOKENS or case.mean(case.left) > QUIET_MEAN or not is_stationary(case, case.left):
        return False
    if case.per_uncertainty(case.left) > QUIET_UNIT:
        return False
    tokens, d = case.tokens, values_at(case.tokens.d, case.left).astype(np.float64)
    likely = np.maximum(tokens.sampler, tokens.trainer)[case.left] >= math.log(0.5)
    for part in (d[likely], d[~likely]):
        if len(part) > MIN_TOKENS and abs(part.mean()) > max(
            QUIET_SIDE * np.abs(part).mean(), CHANCE * part.std() / math.sqrt(len(part))
        ):
            return False
    if abs(np.exp(d).mean() - 1) > QUIET_RATIO:
        return False
    sums, doubts, _ = case.row_sums()
    units = np.sort(sums[doubts > 0] / doubts[doubts > 0])
    return bool(units[-max(len(units) // 10, 1) :].mean() <= QUIET_ROWS * np.median(units))


def _updates_of(tokens: GapTokens) -> NDArray[np.int64] | None:
    """By row ``[R]`` the updates before it: its training step, or its newest version. None = neither is recorded."""
    steps = tokens.step_of_row
    if len(steps) and steps.min() >= 0 and steps.max() > steps.min():
        return steps
    if (tokens.version >= 0).all() and len(tokens.versions) > 1:
        return tokens.newest.astype(np.int64)
    return None


def _seen_before(tokens: GapTokens, updates: NDArray[np.int64]) -> Mask:
    """By row ``[R]`` whether an earlier policy has read its prompt, or its engine says that a prefix was cached."""
    first: dict[bytes, int] = {}
    for row, at in zip(tokens.rows, updates.tolist(), strict=True):
        if row.prompt:
            first[row.prompt] = min(first.get(row.prompt, at), at)
    least = int(updates.min())
    numbers = [
        bool(row.cached) and at > least if row.cached is not None else bool(row.prompt) and first[row.prompt] < at
        for row, at in zip(tokens.rows, updates.tolist(), strict=True)
    ]
    return np.array(numbers, np.bool_)


def _trend(case: CauseCase, rows: NDArray[np.int64]) -> Trend:
    """How the unexplained gap moves over the updates. ``rows``: the updates before each row ``[R]``."""
    sums, uncertain, counts = case.row_sums()
    steps, means = means_of(rows, sums, counts)
    n = len(steps)
    if n > MANY_STEPS and counts.sum() < FEW_TOKENS * n:  # too few tokens of a step: some steps together
        together = -(-n // MANY_STEPS)
        rows = steps[np.minimum(np.searchsorted(steps, rows), n - 1) // together * together]
    parts, units = means_of(rows, sums, uncertain)
    return Trend(steps, means, parts, units)


def _slopes(case: CauseCase) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By training step that has enough tokens: the slope of d over the mean of both log-probabilities, and its weight,
    the sum of squares of that mean."""
    tokens = case.tokens
    rows = tokens.step_of_row
    if not len(rows) or rows.min() < 0:
        return np.zeros(0), np.zeros(0)
    x, y = (values * case.left for values in ((tokens.sampler + tokens.trainer) / np.float32(2), tokens.d))
    _, of = np.unique(rows, return_inverse=True)
    n, sx, sy, sxy, sxx = (
        np.bincount(of, weights=tokens.per_row(weights)) for weights in (case.left, x, y, x * y, x * x)
    )
    has_tokens = n >= MIN_TOKENS
    spreads = np.maximum(sxx - sx * sx / np.maximum(n, 1), 1e-12)
    slopes: NDArray[np.float64] = (sxy - sx * sy / np.maximum(n, 1)) / spreads
    return slopes[has_tokens], spreads[has_tokens]


def _regression(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[float, float]:
    """Slope of y over x, and r²."""
    means = x.mean(dtype=np.float64), y.mean(dtype=np.float64)
    xx = yy = xy = 0.0
    for start in range(0, len(x), BLOCK):
        dx, dy = (values[start : start + BLOCK] - mean for values, mean in zip((x, y), means, strict=True))
        xx, yy, xy = xx + float(dx @ dx), yy + float(dy @ dy), xy + float(dx @ dy)
    return (xy / xx, xy * xy / (xx * yy)) if xx > 1e-9 and yy > 1e-9 else (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Trend:
    """The gap after each update."""

    steps: NDArray[np.int64]  # The updates ``[S]``, ascending.
    means: NDArray[np.float64]  # The mean absolute d after each ``[S]``.
    parts: NDArray[np.int64]
    """The first update of each part ``[P]``: of each one, or of some together where each has few tokens."""
    units: NDArray[np.float64]
    """By part ``[P]`` the absolute d over the uncertainty of tokens, which easy and hard prompts move less."""

    def grows(self) -> bool:
        """Whether the gap grows from the first part to the last, and never falls back to half of what it was. Parts
        that agree, before the growth begins, say nothing of its order."""
        units = self.units
        if len(units) < MIN_STEPS or _falls_back(units):
            return False
        low = np.flatnonzero(units <= max(3 * units.min(), units.max() / 30))
        begin = min(int(low[-1]), max(len(units) - MIN_STEPS, 0))
        return self._grows_from(0) or self._grows_from(begin)

    def _grows_from(self, begin: int) -> bool:
        units = self.units[begin:]
        if len(units) < MIN_STEPS:
            return False
        means = self.means[np.searchsorted(self.steps, self.parts[begin]) :]
        third, tenth = max(len(units) // 3, 1), max(len(units) // 10, 1)
        first, last = float(units[:tenth].mean()), float(units[-third:].mean())
        highest = float(means[-max(len(means) // 3, 1) :].mean())
        if highest <= AGREE_MEAN and not any(
            highest > least and last >= clear * _CLEAR * first for least, clear in FINE
        ):
            return False
        ranks = _rank_correlation(units)
        if last < _CLEAR * first or last < RISES * float(units[:third].mean()):
            is_slow = ranks >= ORDERED_SLOWLY and last >= RISES_SLOWLY * first
            return is_slow and len(units) >= MANY_STEPS and first <= AGREE_UNIT
        is_level = self.jumps() and _rank_correlation(units[1:]) < LEVEL
        # Where the first part agrees far better than the last ones, an uneven order of few tokens matters less.
        return ranks >= (ORDERED_BY_FAR if last >= BY_FAR * first else ORDERED) and not is_level

    def jumps(self) -> bool:
        """Whether the first part agrees and all others disagree, about as much as one another."""
        cut = (len(self.units) - 1) // 10
        later = np.sort(self.units[1:])[cut : len(self.units) - 1 - cut]
        return bool(
            len(later) and self.means[0] <= AGREE_MEAN < self.means[1:].mean() and later[0] >= _CLEAR * self.units[0]
            and later[-1] <= 2 * later[0]
        )


def _falls_back(units: NDArray[np.float64]) -> bool:
    """Whether weights arrived after all: one part far below an earlier one, or several at half of what was reached."""
    apart = 4 * units.min()
    reached = np.maximum.accumulate(np.where(units > apart, units, 0))
    if (units < reached / 10).any():
        return True
    if len(units) < 3:
        return False
    middle = np.median(np.lib.stride_tricks.sliding_window_view(units, 3), axis=1)
    return bool((middle < np.maximum.accumulate(np.where(middle > apart, middle, 0)) / 2).any())


def _first_above(case: CauseCase, trend: Trend) -> int | None:
    """The first step from which on the gap stays clearly above that of the first one."""
    if case.tokens.step_of_row.min() < 0:
        return None
    units = trend.units
    below = np.flatnonzero(units <= max(2 * float(units[0]), float(units.max()) / 30))
    at = int(below[-1]) + 1 if len(below) else 0
    return int(trend.parts[min(at, len(units) - 1)])


def _rank_correlation(y: NDArray[np.float64]) -> float:
    """Spearman's rank correlation of a series with its order."""
    if len(y) < 2:
        return 0.0
    ranks = np.argsort(np.argsort(y)).astype(np.float64)
    return float(np.corrcoef(np.arange(len(y)), ranks)[0, 1])


RUN_RULES: tuple[Callable[[CauseCase], None], ...] = (
    _other_inputs, _top_p_renormalised, _temperature, _over_updates, _in_a_part_of_the_rows, _unexplained,
)
