"""A teacher's column against the student's: what distillation trains on, and the faults of such a column.

A student sampled the tokens, and a teacher gave each a log-probability. ``sampler - trainer`` of a token is its share
of the reverse KL divergence. On-policy distillation lowers that sum. A teacher differs by its nature, so causes
of a gap within one policy are not looked for. docs/distillation.md says how the faults are decided.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.cause_case import MIN_TOKENS, Cause, CauseCase, counted_things
from rollout_inspector.diagnose.gap.cause_kinds import TEACHER_CAUSES
from rollout_inspector.diagnose.gap.tokens import GapTokens
from rollout_inspector.streams.trajectory import Mask

CARRIED = 0.8  # The tokens that carry the loss hold this share of the sum of the absolute differences.
# Thresholds; of log-probabilities in nats. tests/diagnose/test_teacher.py plants the faults into toy teachers.
MAX_LAG = 512  # Tokens by which a column may be moved: the padding of a batch is as long as its longest row lacks.
MOVED_TOKENS, MOVED, MOVED_BETTER, MOVED_CHANCE = 48, 0.5, 0.3, 5.5
"""A row of so many tokens is shifted where moving the column makes the ranks correlate so much. That is also so much
more than in place, and so many standard deviations of what chance does."""
ALIKE = 0.35  # Ranks that correlate so much in place leave no doubt that the column is in its place.
SATURATED, MOST_ODDS, COARSEST = -1e-3, 10.0, -0.01
"""Zeros count where the student is not as good as certain, and one zero counts as so many at most. No precision rounds
a smaller value than the last to 0.0."""
MISSING, MISSING_LEFT = 8.0, 0.25
"""Zeros are filled in where so many impossible tokens would stand beside them, and at most this part does."""
STRANGE, STRANGE_BEST, STRANGE_TOKENS, STRANGE_IDS = 5.0, -3.0, 3, 8
"""An id is strange to the teacher where it has so many nats less on the mean, and at best this value, at so many places
at least. So many strange ids are another vocabulary."""
STRANGE_ALL = 0.5  # ... or strange ids have this share of all tokens.
SURE, SURE_IDS, FLAT, FLAT_BEST = -0.003, 8, -0.02, -0.008
"""Tokens that the student is as good as certain of, and the ids that are needed. A teacher at a higher temperature has
at most this median over them, and this value at the best tenth."""
NOISY = 0.5  # The noise of the engine over the mean difference: the signal drowns in it.


@dataclass(frozen=True)
class TeacherFigures:
    """What a run's distillation trains on."""

    reverse_kl: float | None  # The mean of student - teacher over the tokens, in nats; None = no token.
    carriers: int  # The fewest tokens that hold :data:`CARRIED` of the sum of absolute differences.
    carriers_share: float | None  # Of all compared tokens.
    noise_share: float | None  # The engine's own noise over the mean absolute difference; None = not measured.

    @classmethod
    def of(cls, tokens: GapTokens) -> "TeacherFigures":
        n = len(tokens)
        sizes = np.sort(tokens.size.astype(np.float64))[::-1]
        carriers = int(np.searchsorted(np.cumsum(sizes), CARRIED * sizes.sum())) + 1 if n and sizes[0] > 0 else 0
        mean = float(sizes.mean()) if n else 0.0
        return cls(
            -float(tokens.d.mean(dtype=np.float64)) if n else None, carriers, carriers / n if n else None,
            tokens.noise[0] / mean if tokens.noise is not None and mean else None,
        )


def teacher_causes(tokens: GapTokens) -> tuple[list[Cause], dict[str, str]]:
    """The faults of a teacher's column, and the undecided ones with a sentence why."""
    case = CauseCase(tokens)
    for rule in (_moved, _vocabulary, _filled, _flat, _noise):
        rule(case)
    case.undecided.setdefault("temperature", TEACHER_CAUSES["temperature"].needs)
    names = {cause.cause for cause in case.causes}
    return case.causes, {name: sentence for name, sentence in case.undecided.items() if name not in names}


def _filled(case: CauseCase) -> None:
    """Zeros that were filled in. A teacher that is certain of a token at a place where the student draws it with
    probability p would have found impossible what the student draws else: (1 - p) / p such tokens for each one."""
    tokens = case.tokens
    if case.causes:
        title = TEACHER_CAUSES[case.causes[0].cause].title
        case.undecided["placeholder"] = f"“{title}” may leave zeros. Mend that first."
        return
    zero = case.left & (tokens.trainer == 0) & (tokens.sampler < SATURATED)
    odds = np.minimum(np.expm1(-tokens.sampler[zero].astype(np.float64)), MOST_ODDS)
    # What rounds to 0.0 leaves all other tokens no more than the least value that does not.
    finest = float(np.max(tokens.trainer, where=tokens.trainer < 0, initial=-1.0))
    rounds = finest > COARSEST
    impossible = int((case.left & (tokens.trainer <= np.log(-finest))).sum()) if rounds else 0
    if float(odds.sum()) >= MISSING and impossible <= MISSING_LEFT * float(odds.sum()):
        ids, counts = np.unique(tokens.ids[zero], return_counts=True)
        common = ", ".join(str(token) for token in ids[np.argsort(-counts, kind="stable")[:5]])
        case.name(
            "placeholder", zero,
            f"The teacher has exactly 0.0 on {counted_things(int(zero.sum()), 'token')} where the student has "
            f"{tokens.sampler[zero].mean(dtype=np.float64):.3g} on the mean. Were it certain, the student would "
            f"have drawn about {odds.sum():,.0f} tokens that it finds impossible, and drew {impossible:,}. "
            f"The {'id is' if len(ids) == 1 else 'most common ids are'} {common}.",
        )


def _by_id(tokens: GapTokens, among: Mask) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each id that stands among these tokens, with all places of the id in the run."""
    use = np.flatnonzero(np.isin(tokens.ids, np.unique(tokens.ids[among])))
    order = use[np.argsort(tokens.ids[use], kind="stable")]
    ids, starts = np.unique(tokens.ids[order], return_index=True)
    yield from zip(ids.tolist(), np.split(order, starts[1:]) if len(ids) else (), strict=True)


def _moved(case: CauseCase) -> None:
    """Rows whose column lies before or behind its place, by any number of tokens: each row may be padded otherwise."""
    tokens = case.tokens
    pooled, n_pooled, lags = np.zeros(2 * MAX_LAG + 1), 0, np.zeros(len(tokens.rows), np.int64)
    for row, n in enumerate(np.diff(tokens.starts).tolist()):
        correlations = _correlations(tokens, row)
        if correlations is not None:
            pooled, n_pooled = pooled + n * correlations, n_pooled + n
            lags[row] = _lag(correlations, n) if n >= MOVED_TOKENS else 0
    if n_pooled and (same := _lag(pooled / n_pooled, n_pooled)):
        for row in np.flatnonzero(lags == 0).tolist():
            correlations = _correlations(tokens, row)
            if correlations is not None and correlations[MAX_LAG + same] - correlations[MAX_LAG] >= MOVED_BETTER:
                lags[row] = same
    moved = lags != 0
    where = case.in_rows(moved)
    if where.sum() >= MIN_TOKENS:
        least, most = int(np.abs(lags[moved]).min()), int(np.abs(lags).max())
        by = counted_things(most, "token") if least == most else f"{least} to {most} tokens"
        side = "behind" if lags.sum() > 0 else "before"
        case.name(
            "columns_shifted", where,
            f"In {counted_things(int(moved.sum()), 'row')} of {len(tokens.rows):,} the teacher's column lies {by} "
            f"{side} its place: moved back, it rises and falls with the student's.",
        )


def _correlations(tokens: GapTokens, row: int) -> NDArray[np.float64] | None:
    """How the ranks of both columns of a row correlate when the teacher's is moved by -MAX_LAG to MAX_LAG tokens
    ``[2 * MAX_LAG + 1]``. None = the row is short, or one side is constant."""
    start, stop = int(tokens.starts[row]), int(tokens.starts[row + 1])
    n = stop - start
    if n < MOVED_TOKENS // 4:
        return None
    offsets = tokens.offset[start:stop] - tokens.offset[start]
    sides = []
    for values in (tokens.sampler[start:stop], tokens.trainer[start:stop]):
        _, of, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[of]
        dense = np.zeros(int(offsets[-1]) + 1)
        dense[offsets] = ranks - ranks.mean()
        norm = float(np.sqrt((dense**2).sum()))
        if not norm:
            return None
        sides.append(dense / norm)
    student, teacher = sides
    in_place = float(student @ teacher)
    if in_place >= ALIKE and n >= MOVED_TOKENS:
        result = np.zeros(2 * MAX_LAG + 1)  # in its place: the lags need not be looked at
        result[MAX_LAG] = in_place
        return result
    size = 1 << (len(student) + MAX_LAG).bit_length()
    spectrum = np.conj(np.fft.rfft(student, size)) * np.fft.rfft(teacher, size)
    whole = np.fft.irfft(spectrum, size)
    return np.concatenate([whole[-MAX_LAG:], whole[: MAX_LAG + 1]])


def _lag(correlations: NDArray[np.float64], n: int) -> int:
    """The number of tokens that the teacher's column is moved by; 0 = it is in its place, or nothing tells."""
    best = int(np.argmax(correlations))
    least = max(MOVED, MOVED_CHANCE / n**0.5, correlations[MAX_LAG] + MOVED_BETTER)
    return best - MAX_LAG if correlations[best] >= least else 0


def _vocabulary(case: CauseCase) -> None:
    tokens = case.tokens
    strange: list[int] = []
    for token, places in _by_id(tokens, case.left & (tokens.trainer <= STRANGE_BEST)):
        places = places[case.left[places]]
        if len(places) < STRANGE_TOKENS or float(tokens.trainer[places].max()) > STRANGE_BEST:
            continue
        if float(tokens.d[places].mean(dtype=np.float64)) <= -STRANGE:
            strange.append(token)
    where = case.left & np.isin(tokens.ids, strange)
    if where.sum() >= MIN_TOKENS and (len(strange) >= STRANGE_IDS or where.sum() >= STRANGE_ALL * case.left.sum()):
        case.name(
            "other_vocabulary", where,
            f"{counted_things(len(strange), 'id')} never stand{'s' if len(strange) == 1 else ''} where the teacher "
            f"expects them: it has {tokens.trainer[where].mean(dtype=np.float64):.3g} on the mean where the student "
            f"has {tokens.sampler[where].mean(dtype=np.float64):.3g}. They run from {min(strange)} to {max(strange)}; "
            f"the other {counted_things(len(np.unique(tokens.ids)) - len(strange), 'id')} fit.",
        )


def _flat(case: CauseCase) -> None:
    tokens = case.tokens
    sure = case.left & (tokens.sampler >= SURE)
    ids, of, counts = np.unique(tokens.ids[sure], return_inverse=True, return_counts=True)
    if len(case.causes) or sure.sum() < MIN_TOKENS or len(ids) < SURE_IDS:
        return
    values = np.bincount(of, weights=tokens.trainer[sure]) / counts  # few contexts that come again are no witnesses
    middle, best = (float(np.exp(np.quantile(values, share))) for share in (0.5, 0.9))
    if np.log(middle) <= FLAT and np.log(best) <= FLAT_BEST:
        case.name(
            "temperature", case.left.copy(),
            f"Where the student gives 0.997 at least, on {int(sure.sum()):,} tokens of {len(ids):,} ids, the teacher "
            f"gives {middle:.3f} to the middle id and {best:.3f} to the best tenth. It is sure of nothing.",
        )


def _noise(case: CauseCase) -> None:
    tokens = case.tokens
    mean = float(tokens.size.mean(dtype=np.float64))
    if tokens.noise is None:
        case.undecided["replica_noise"] = TEACHER_CAUSES["replica_noise"].needs
    elif tokens.noise[0] >= NOISY * mean:
        case.name(
            "replica_noise", case.left.copy(),
            f"The engine differs from itself by {tokens.noise[0]:.3g} nats on the mean, and the teacher from the "
            f"student by {mean:.3g}.",
        )
