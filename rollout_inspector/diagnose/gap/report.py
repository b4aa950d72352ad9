"""The gap of a run as one JSON object: figures, causes, the worst tokens, and the gap by what a token is and where."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.cause_case import Cause, CauseCase, limits_of
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES, TEACHER_CAUSES, GapCause
from rollout_inspector.diagnose.gap.figures import GapFigures, effective_share
from rollout_inspector.diagnose.gap.place_rules import OF_SCOPE, PLACE_RULES, heavy_behind
from rollout_inspector.diagnose.gap.run_rules import RUN_RULES
from rollout_inspector.diagnose.gap.teacher import TeacherFigures, teacher_causes
from rollout_inspector.diagnose.gap.token_classes import TokenClass
from rollout_inspector.diagnose.gap.tokens import GapTokens
from rollout_inspector.streams.trajectory import Mask

OVER_ALL = frozenset(
    ("temperature", "top_p_renormalised", "weights_not_delivered", "weights_rounded_away", "unexplained")
)
"""Causes that move all tokens, so that others may lie behind them."""
HIDDEN = ("routing_repeated", "near_context_limit", "first_token", "heavy_tokens")
"""Causes of some tokens, which a cause of all tokens may hide."""


def causes_of(tokens: GapTokens) -> tuple[list[Cause], dict[str, str]]:
    """The causes of the gap of a run in the order of the rules, and the undecided ones with a sentence why. No cause =
    sampler and trainer agree to rounding. The sentence says what is missing to decide a cause. Rules of one place come
    first; the rules of the whole run look at what these leave. docs/gap.md lists them."""
    if not len(tokens):
        return [], {}
    states = _states(CauseCase(tokens), PLACE_RULES)
    case, n_in_places = _states(states[-1], RUN_RULES)[-1], len(states[-1].causes)
    if any(cause.cause in OVER_ALL for cause in case.causes):
        views = [behind := _also_in_quiet_steps(states)]
        for scope in behind.quiet():
            views.append(behind.copied())
            views[-1].scope = scope
            heavy_behind(views[-1])
        # The fewest steps may hold too few tokens of a heavy id to tell it.
        behind = max(views, key=lambda view: view.causes[-1].tokens if len(view.causes) > len(behind.causes) else 0)
        if len(behind.causes) > n_in_places:  # else the rules of the run name the same again
            behind = _states(behind, RUN_RULES)[-1]
            names, more = ({cause.cause for cause in view.causes} for view in (case, behind))
            if more > names - {"unexplained"} and "unexplained" not in more:
                case = behind
    names = {cause.cause for cause in case.causes}
    if hiding := [name for name in CAUSES if name in names & (OVER_ALL - {"unexplained"})]:
        for name in HIDDEN:
            sentence = f"“{CAUSES[hiding[0]].title}” moves all tokens and may hide it. Mend that first."
            case.undecided.setdefault(name, sentence)
    undecided = {
        name: " ".join(filter(None, (case.undecided[name], CAUSES[name].decides_now)))
        for name in CAUSES if name in case.undecided.keys() - names
    }
    return sorted(case.causes, key=lambda cause: list(CAUSES).index(cause.cause)), undecided


def _states(case: CauseCase, rules: Sequence[Callable[[CauseCase], None]]) -> list[CauseCase]:
    """The case before each of these rules, and behind the last one."""
    states = [case]
    for rule in rules:
        states.append(states[-1].copied())
        rule(states[-1])
    return states


def _also_in_quiet_steps(states: list[CauseCase]) -> CauseCase:
    """What the rules of places name where those of a scope look in all steps, and where nothing shows in those that
    agree best. ``states``: before each of the rules in all steps, and behind the last one."""
    for n in map(PLACE_RULES.index, OF_SCOPE):
        for scope in states[n].quiet():
            view, n_causes = states[n].copied(), len(states[n].causes)
            view.scope = scope
            if len(states[n + 1].causes) == n_causes and not scope.all():
                PLACE_RULES[n](view)
            if len(view.causes) > n_causes:
                view.scope = states[n].scope
                states[n + 1 :] = _states(view, PLACE_RULES[n + 1 :])
    return states[-1].copied()


VERSION = 8  # Raise it when a report says other things than before: stored ones are then stale.
MAX_WORST = 50  # Tokens that a report lists, those of the greatest absolute d.
SCANNED = 1024  # Tokens of a stretch, of which the greatest absolute d alone is looked at first.
LONG = 8  # Tokens that stretches of one part have on the mean at least, where they are added up first.
MAX_IDS = 20  # Token ids that a report lists, those that hold most of the gap.
MAX_PARTS = 24  # Lines of a table.
TAIL = float(np.log(2))  # Both tails of d: half of the sampler's probability at most, or twice as much.
_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
"""Where the lines of a table over positions begin."""
SAMPLED, KEPT, DECODE, ENGINES, WEIGHTS, BOTH, TRAINER = PARTS = (
    "rest", "kept set", "decode against prefill", "engine against engine", "weights (version)", "engine and weights",
    "trainer",
)
"""In the order in which they are added: from the sampler's value to the trainer's."""
BY_CLASS = "parts of the gap, "  # What the name of a table of parts begins with; the class of the tokens follows.


@dataclass(frozen=True)
class EnginePass:
    """What one engine with one set of weights says of a run. Both names are of :attr:`GapTokens.scored`."""

    prefill: str  # The column that was read at once.
    decode: str  # The column that was decoded token by token.
    engine: str  # The engine with its version.
    weights: str  # The served model with a digest of its weights.


def parts_of(tokens: GapTokens, replays: Sequence[EnginePass]) -> dict[str, NDArray[np.float64]]:
    """Part -> its nats ``[N]``, so that their sum is ``d``; NaN where a token lacks a value. Empty without a replay.
    The first replay stands for the sampler's engine. What it does not give again is the kept set, where its mass is
    recorded, and the rest. The rest is another engine, other weights or another cache when the run was sampled."""
    if not replays or not len(tokens):
        return {}
    columns = {name: values.astype(np.float64) for name, values in tokens.scored.items()}
    first, last = replays[0], replays[-1]
    parts = dict.fromkeys(PARTS, np.zeros(len(tokens)))
    parts[KEPT] = np.zeros(len(tokens)) if tokens.kept_mass is None else tokens.kept_mass.astype(np.float64)
    parts[SAMPLED] = columns[first.decode] - tokens.sampler - parts[KEPT]
    parts[DECODE] = columns[first.prefill] - columns[first.decode]
    for before, behind in pairwise(replays):
        name = between(before, behind)
        parts[name] = parts[name] + columns[behind.prefill] - columns[before.prefill]
    parts[TRAINER] = tokens.trainer - columns[last.prefill]
    return parts


def between(before: EnginePass, behind: EnginePass) -> str:
    """The part that the difference of two replays belongs to."""
    is_same = before.engine == behind.engine, before.weights == behind.weights
    return {(True, False): WEIGHTS, (False, True): ENGINES}.get(is_same, BOTH)


def parts_report(tokens: GapTokens, replays: Sequence[EnginePass]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Tables of the parts: of all tokens, and of each class. A line has the tokens, both means, and the share.

    ``share``: the part of the sum of absolute parts. Parts that are 0 everywhere are left out, the rest is told always.
    """
    parts = parts_of(tokens, replays)
    has_all = np.isfinite(sum(parts.values(), np.zeros(len(tokens))))
    for label, use in [("all tokens", has_all), *((of.label, has_all & (tokens.kind == of)) for of in TokenClass)]:
        if not parts or not use.any():
            continue
        whole = sum(float(np.abs(values[use]).sum()) for values in parts.values()) or 1.0
        yield f"{BY_CLASS}{label}", [
            {
                "name": name, "tokens": int(use.sum()), "mean_abs": float(np.abs(values[use]).mean()),
                "mean": float(values[use].mean()), "share": float(np.abs(values[use]).sum()) / whole,
                "equal": int((values[use] == 0).sum()),
            }
            for name, values in parts.items() if name == SAMPLED or np.any(values[use])
        ]


def causes_in(report: Mapping[str, Any]) -> Mapping[str, GapCause]:
    """The words of the causes that a report may name."""
    return TEACHER_CAUSES if report["teacher"] else CAUSES


def gap_report(tokens: GapTokens, replays: Sequence[EnginePass] = (), teacher: bool = False) -> dict[str, Any]:
    """All that a page says of the gap of a run. ``replays``: what engines said of it later, the sampler's own first.

    ``mean_abs``, ``k1``, ``k2``, ``k3`` are means over tokens, in nats, and ``ratio`` is the mean importance ratio
    ``exp(d)``; None without compared tokens. A ``parts`` table has a line for each part: name, tokens, mean absolute d,
    mean of d, share of the gap, confident disagreements, and the tokens of both tails. ``measures`` are what recipes
    accept a run by, see :func:`_measures`. ``confident`` lists the worst confident disagreements, and
    ``confident_tokens`` counts all of them. ``decidable_now``: cause -> whether the
    rows of one training step decide it.

    ``teacher``: the trainer's column is a teacher's. The causes are then faults of such a column, and the value of that
    name has the fields of :class:`~rollout_inspector.diagnose.gap.teacher.TeacherFigures`; else it is None.
    """
    figures = GapFigures.of(tokens.d)
    n = figures.tokens
    kinds = TEACHER_CAUSES if teacher else CAUSES
    causes, undecided = (teacher_causes if teacher else causes_of)(tokens) if n else ([], {})
    measures = _measures(tokens, figures)
    return {
        **figures.values(),
        "rows": len(tokens.rows),
        "rows_without": tokens.rows_without,
        "columns": dict(tokens.columns),
        "k1": measures["k1"],
        "k2": measures["k2"],
        "ratio": (figures.k3 + figures.total) / n + 1 if n else None,
        "causes": [
            {"cause": cause.cause, "evidence": cause.evidence, "from_step": cause.from_step, "tokens": cause.tokens,
             "decidable_now": not kinds[cause.cause].decides_now, "example": _token(tokens, cause.worst)}
            for cause in causes
        ],
        "undecided": undecided,
        "limits": dict(zip(("mean", "tail"), limits_of(tokens.noise), strict=True)),
        "decidable_now": {name: not cause.decides_now for name, cause in kinds.items()},
        "teacher": vars(TeacherFigures.of(tokens)) if teacher else None,
        "measures": measures,
        "confident": [_token(tokens, int(place)) for place in _worst(tokens, tokens.confident)],
        "confident_tokens": int(tokens.confident.sum()),
        "worst": [_token(tokens, int(place)) for place in _worst(tokens)],
        "parts": {name: lines for name, lines in _parts(tokens) if len(lines) > 1}
        | dict(parts_report(tokens, replays)),
        "ids": _by_id(tokens),
        "steps": _by_step(tokens),
    }


def _measures(tokens: GapTokens, figures: GapFigures) -> dict[str, float | None]:
    """What recipes accept a run by; None without compared tokens.

    ``bitwise_equal``: the share of tokens with the same float32 on both sides. ``token_multiplicative_error``: the mean
    of ``exp(|d|)``, which NVIDIA's recipes accept up to 1.03 to 1.05 (NeMo RL, ``token_mult_prob_error``). ``ess``: the
    effective sample size as a share (Kish 1965). ``k1``, ``k2``, ``k3``: estimates of the divergence (Schulman 2020).
    """
    n = figures.tokens
    factors = np.exp(np.minimum(tokens.size, 20.0))
    return {
        "bitwise_equal": float(np.mean(tokens.sampler == tokens.trainer)) if n else None,
        "token_multiplicative_error": float(factors.mean(dtype=np.float64)) if n else None,
        "ess": effective_share(figures), "k1": None if figures.mean is None else -figures.mean,
        "k2": figures.total_square / 2 / n if n else None, "k3": figures.mean_k3,
    }


def _worst(tokens: GapTokens, of: Mask | None = None) -> NDArray[np.int64]:
    """The places of the greatest absolute d, greatest first. ``of`` ``[N]``: among these tokens alone."""
    if of is None and len(tokens) > MAX_WORST * SCANNED:  # as many stretches hold a token of the least size that counts
        highest = np.maximum.reduceat(tokens.size, np.arange(0, len(tokens), SCANNED))
        of = tokens.size >= np.partition(highest, -MAX_WORST)[-MAX_WORST]
    places = np.arange(len(tokens)) if of is None else np.flatnonzero(of)
    size, n = tokens.size[places], min(MAX_WORST, len(places))
    top = np.argpartition(size, len(size) - n)[len(size) - n :] if n else places
    return places[top[np.lexsort((top, -size[top]))]]


def _token(tokens: GapTokens, place: int) -> dict[str, Any]:
    row = tokens.rows[tokens.row[place]]
    return {
        "trajectory": row.trajectory, "row": row.row, "offset": int(tokens.offset[place]), "id": int(tokens.ids[place]),
        "sampler": round(float(tokens.sampler[place]), 5), "trainer": round(float(tokens.trainer[place]), 5),
        "training_step": row.training_step,
    }


def _parts(tokens: GapTokens) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The gap by each axis that is known: name of the axis, lines."""
    if not len(tokens):
        return
    columns: list[NDArray[Any]] = [values.astype(np.float64) for values in (tokens.size, tokens.d)]
    columns += [np.flatnonzero(where) for where in (tokens.confident, tokens.d <= -TAIL, tokens.d >= TAIL)]
    lines = partial(_lines, columns)
    if tokens.kind is not None:
        yield "token class", lines(tokens.kind, lambda one: TokenClass(one).label)
    yield "position in the completion", lines(_bins(tokens.position), _between)
    from_end = max(row.length for row in tokens.rows) - 1 - tokens.offset
    yield "tokens before the longest row's end", lines(_bins(from_end), _between)
    yield "turn", lines(np.minimum(tokens.turn, MAX_PARTS - 1), lambda one: f"turn {one}")
    after = ((tokens.position == 0) & (tokens.turn > 0)).view(np.uint8)
    names = ("all others", "first after an observation")
    yield "first token after an observation", lines(after, lambda one: names[one])
    if any(row.cached is not None for row in tokens.rows):
        cached = np.array([-1 if row.cached is None else int(row.cached > 0) for row in tokens.rows])
        titles = ("no cached prefix", "cached prefix", "not recorded")
        yield "prefix cache", lines(tokens.of_rows(cached), lambda one: titles[one])
    if len(workers := tokens.workers) > 1:
        worker = tokens.of_rows(np.minimum(tokens.worker, MAX_PARTS - 1))
        yield "worker", lines(worker, lambda one: workers[one] or "not recorded")
    if any(row.packed is not None for row in tokens.rows):
        packed = np.array([-1 if row.packed is None else min(row.packed, MAX_PARTS) for row in tokens.rows])
        yield "place in the pack", lines(tokens.of_rows(packed), lambda one: str(one) if one >= 0 else "not recorded")
    if len(tokens.versions) > 1:
        lag = np.minimum(tokens.lag, MAX_PARTS)
        yield "policy lag", lines(lag, lambda one: "not recorded" if one < 0 else _updates(one))
        recent = np.where(tokens.version < 0, -1, np.maximum(tokens.version, len(tokens.versions) - MAX_PARTS))
        yield "policy version", lines(recent, lambda one: "not recorded" if one < 0 else tokens.versions[one])


def _updates(lag: int) -> str:
    more = " and more" if lag == MAX_PARTS else ""
    return "the newest" if lag == 0 else f"{lag}{more} version{'' if lag == 1 else 's'} older"


def _bins(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Index of the stretch of :data:`_EDGES` that each value lies in."""
    table = np.searchsorted(_EDGES, np.arange(_EDGES[-1] + 1), side="right") - 1
    bins: NDArray[np.uint8] = table.astype(np.uint8)[np.minimum(values, _EDGES[-1])]
    return bins


def _between(part: int) -> str:
    first = _EDGES[part]
    if part + 1 == len(_EDGES):
        return f"{first:,} and more"
    last = _EDGES[part + 1] - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _lines(columns: Sequence[NDArray[Any]], part: NDArray[Any], name: Callable[[int], str]) -> list[dict[str, Any]]:
    """``columns``: the absolute d, and d; then the places of confident disagreements and of both tails."""
    starts, n, least = np.flatnonzero(np.r_[True, part[1:] != part[:-1]]), None, int(part.min())
    columns, marks = columns[:2], [part[places].astype(np.int64) - least for places in columns[2:]]
    if LONG * len(starts) < len(part):  # stretches of one part are added up first
        columns, n = [np.add.reduceat(column, starts) for column in columns], np.diff(starts, append=len(part))
        part = part[starts]
    shifted = part.astype(np.int64) - least
    counts, sizes, sums = (np.bincount(shifted, weights=weights) for weights in (n, *columns))
    confident, low, high = (np.bincount(mark, minlength=len(counts)).tolist() for mark in marks)
    whole = float(sizes.sum()) or 1.0
    return [
        {
            "name": name(int(index) + least), "tokens": int(counts[index]),
            "mean_abs": float(sizes[index] / counts[index]), "mean": float(sums[index] / counts[index]),
            "share": float(sizes[index] / whole), "confident": confident[index], "low": low[index], "high": high[index],
        }
        for index in np.flatnonzero(counts)
    ]


def _by_id(tokens: GapTokens) -> list[dict[str, Any]]:
    """The token ids that hold most of the gap."""
    sums, counts = tokens.sums_of_ids
    whole = float(sums.sum()) or 1.0
    top = np.argsort(-sums, kind="stable")[:MAX_IDS]
    return [
        {"id": int(token_id), "tokens": int(counts[token_id]), "mean_abs": float(sums[token_id] / counts[token_id]),
         "share": float(sums[token_id] / whole)}
        for token_id in top
        if sums[token_id] > 0
    ]


def _by_step(tokens: GapTokens) -> list[dict[str, Any]]:
    """The mean absolute d of each training step; empty = no row has one."""
    steps = tokens.step_of_row
    if not len(steps) or steps.max() < 0:
        return []
    of, index = np.unique(steps, return_inverse=True)
    sums = np.bincount(index, weights=tokens.per_row(tokens.size))
    counts = np.bincount(index, weights=np.diff(tokens.starts))
    return [
        {"training_step": int(step), "tokens": int(n), "mean_abs": float(total / n)}
        for step, total, n in zip(of, sums, counts, strict=True)
        if step >= 0 and n
    ]
