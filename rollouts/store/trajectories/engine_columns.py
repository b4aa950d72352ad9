"""What an engine told beside the tokens of a row: entropy, kept set and alternatives, as columns and of one token.

Columns belong to rows that follow from their steps. Alternatives are told of each token that stands as it was sampled.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from rollout_inspector.streams import alternatives
from rollout_inspector.streams.align import sampled_in_row
from rollout_inspector.streams.alternatives import Alternatives
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids
from rollouts.store import models
from rollouts.store.token_arrays.items import ALTERNATIVES
from rollouts.store.token_arrays.reading import steps_with_tokens
from rollouts.store.trajectories.rows import row_columns
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

ENTROPY, KEPT_SET = "entropy", "kept_set"  # As the engine told them.
AT_LEAST = "entropy_at_least"  # What follows from the alternatives alone, where an engine knew no entropy.
BEHIND = "behind_likeliest"  # How far the sampled token stands behind the likeliest one.


def names_beside(rows: Sequence[RowSummary], steps: Sequence[StepSummary]) -> dict[int, list[str]]:
    """Row index -> the names of the columns that the row has by what engines told. No query. ``rows`` and ``steps``:
    all of the trajectory. A row without such columns is left out."""
    with_values = {step.index: step for step in steps if _has_values(step)}
    names = {}
    for row in rows if with_values else ():
        own = [with_values[index] for index in row.steps if index in with_values] if row.follows_steps else []
        has = {
            ENTROPY: any(step.has_entropy for step in own),
            KEPT_SET: any(step.least_kept is not None for step in own),
            AT_LEAST: any(step.n_alternatives and not step.has_entropy for step in own),
            BEHIND: any(step.n_alternatives for step in own),
        }
        if any(has.values()):
            names[row.index] = [name for name, there in has.items() if there]
    return names


def columns_of_window(
    row: RowSummary, steps: Sequence[StepSummary], start: int, stop: int, names: Collection[str] | None = None
) -> dict[str, Floats]:
    """What a trainer or engines told of the tokens ``[start, stop)`` of a row, each ``[stop - start]``. One query.
    ``names``: only these; those that the row lacks are left out. NaN where a column has no value."""
    if row.follows_steps:
        own = [name for name in names_beside([row], steps).get(row.index, []) if names is None or name in names]
        return columns_beside(row, steps, own, start, stop) if own else {}
    columns = {}
    for name, values in row_columns(row.handle, start, stop, names).items():
        columns[name] = np.full(stop - start, np.nan, np.float32)
        columns[name][: len(values)] = values
    return columns


def columns_beside(
    row: RowSummary, steps: Sequence[StepSummary], names: Collection[str], start: int, stop: int
) -> dict[str, Floats]:
    """The columns ``names`` of the tokens ``[start, stop)`` of a row, each ``[stop - start]``, in nats. One query. NaN
    where a token was not sampled, or nothing was told."""
    columns: dict[str, Floats] = {name: np.full(stop - start, np.nan, dtype=np.float32) for name in names}
    # The steps whose completions touch these tokens.
    here = [
        step
        for step in steps
        if row.follows_steps and step.index in row.steps and _has_values(step)
        and step.prompt_length < stop and step.prompt_length + step.completion_length > start
    ]
    read = _read(here, tuple(names) if set(names) <= {ENTROPY, KEPT_SET} else _ALL)
    for step in here:
        first = step.prompt_length
        a, b = max(first, start), min(first + step.completion_length, stop)
        for name, column in _columns(step, read[step.pk], names).items():
            part = column[a - first : b - first]
            columns[name][a - start : a - start + len(part)] = part
    return columns


def _has_values(step: StepSummary) -> bool:
    return bool(step.has_entropy or step.n_alternatives) or step.least_kept is not None


def _columns(step: StepSummary, tokens: models.StepTokens, names: Collection[str]) -> dict[str, Floats]:
    """The columns ``names`` of a completion, each ``[C]``; those that it lacks are left out."""
    columns = {name: getattr(tokens, name) for name in (ENTROPY, KEPT_SET) if name in names}
    alternatives_of_step = _told(step, tokens) if BEHIND in names or AT_LEAST in names else None
    if alternatives_of_step is not None and BEHIND in names and tokens.logprobs is not None:
        columns[BEHIND] = alternatives.behind_likeliest(alternatives_of_step, tokens.logprobs)
    if alternatives_of_step is not None and AT_LEAST in names and not step.has_entropy:
        columns[AT_LEAST] = alternatives.entropy_at_least(alternatives_of_step)
    return {name: column for name, column in columns.items() if column is not None}


def _told(step: StepSummary, tokens: models.StepTokens) -> Alternatives | None:
    return alternatives.unpacked(tokens.alternative_ids, tokens.alternative_logprobs, step.completion_length)


MAX_ALIGNED = 3_000_000
"""The most tokens of prompts and completions that are read to find sampled tokens in a row with tokens of its own."""


SampledPart = tuple[StepSummary, int, int, int]
"""Tokens of a row as a step sampled them: the step, the row offset of the first, its offset in the completion, n."""


def parts_beside(
    trajectory: models.StoredTrajectory, row: RowSummary, steps: Sequence[StepSummary]
) -> list[SampledPart]:
    """The tokens of a row that have alternatives or a kept set. No query, except for a row with tokens of its own whose
    steps have some: it is aligned with what they sampled, or has none where that is too long."""
    told_steps = {
        step.index: step for step in steps
        if (step.n_alternatives or step.least_kept is not None) and step.index in row.steps
    }
    if row.follows_steps:
        return [(step, step.prompt_length, 0, step.completion_length) for step in told_steps.values()]
    if not told_steps or sum(step.prompt_length + step.completion_length for step in steps) > MAX_ALIGNED:
        return []
    (value,) = load_trajectories([trajectory])
    place = trajectory.rows.filter(last_step=None, index__lt=row.index).count()
    places = sampled_in_row(value.steps, value.rows[place])
    return [(told_steps[step], start, first, n) for start, step, first, n in places if step in told_steps]


def spans_beside(parts: Iterable[SampledPart], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Start, stop and number of alternatives of each of the parts in ``[start, stop)``. No query."""
    return [
        (max(begin, start), min(begin + n, stop), step.n_alternatives or 0)
        for step, begin, _, n in parts
        if begin < stop and begin + n > start
    ]


def beside_token(
    parts: Iterable[SampledPart], offset: int
) -> tuple[float | None, Alternatives, Ids, dict[str, float]] | None:
    """What an engine told beside the token ``offset`` of a row; None = nothing. At most one query. It is
    the log-probability that the step recorded for the token itself, then the likeliest ids ``[K]`` at its place,
    likeliest first, with their log-probabilities. Then come the ids that it could be drawn from, where they are stored.
    Last are the columns of the row at the token that are known."""
    places = ((step, first + offset - start) for step, start, first, n in parts if start <= offset < start + n)
    step, at = next(places, (None, 0))
    if step is None:
        return None
    tokens = _read([step], _ALL)[step.pk]
    of_step = _told(step, tokens)
    columns = _columns(step, tokens, (ENTROPY, KEPT_SET, AT_LEAST, BEHIND))
    values = {name: float(column[at]) for name, column in columns.items() if np.isfinite(column[at])}
    own = None if tokens.logprobs is None or not np.isfinite(tokens.logprobs[at]) else float(tokens.logprobs[at])
    likeliest = (NO_IDS, np.zeros(0, np.float32)) if of_step is None else (of_step[0][at], of_step[1][at])
    is_there = np.isfinite(likeliest[1])
    drawable = alternatives.kept_at(tokens.kept_set, tokens.kept_ids, at)
    return own, (likeliest[0][is_there], likeliest[1][is_there]), drawable, values


_ALL = ("logprobs", ENTROPY, KEPT_SET, *ALTERNATIVES)


def _read(steps: Sequence[StepSummary], names: Collection[str]) -> dict[int, models.StepTokens]:
    """The arrays ``names`` of steps, by the key of the step."""
    if not steps:
        return {}
    stored = models.StoredStep.objects.filter(pk__in=[step.pk for step in steps])
    return {stored_step.pk: stored_step.tokens for stored_step in steps_with_tokens(stored, names)}
