"""What an engine told beside the tokens of a row: entropy and alternatives, as columns and of one token.

Columns belong to rows that follow from their steps. Alternatives are told of each token that stands as it was sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_inspector.streams import alternatives
from rollout_inspector.streams.alternatives import Alternatives
from rollout_inspector.streams.row_places import sampled_in_row
from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.store import models
from rollouts.store.token_arrays.reading import steps_with_tokens
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

ENTROPY = "entropy"
"""As the engine knew it."""
AT_LEAST = "entropy_at_least"
"""What follows from the alternatives alone, where an engine knew no entropy."""
BEHIND = "behind_likeliest"
"""How far the sampled token stands behind the likeliest one."""


def names_beside(rows: Sequence[RowSummary], steps: Sequence[StepSummary]) -> dict[int, list[str]]:
    """Row index -> the names of the columns that the row has by what engines told. No query.

    ``rows`` and ``steps``: all of the trajectory. A row without such columns is left out.
    """
    told = {step.index: step for step in steps if step.has_entropy or step.n_alternatives}
    found = {}
    for row in rows if told else ():
        own = [told[index] for index in row.steps if index in told] if row.follows_steps else []
        has = {
            ENTROPY: any(step.has_entropy for step in own),
            AT_LEAST: any(step.n_alternatives and not step.has_entropy for step in own),
            BEHIND: any(step.n_alternatives for step in own),
        }
        if any(has.values()):
            found[row.index] = [name for name, there in has.items() if there]
    return found


def columns_beside(
    row: RowSummary, steps: Sequence[StepSummary], names: Collection[str], start: int, stop: int
) -> dict[str, Floats]:
    """The columns ``names`` of the tokens ``[start, stop)`` of a row, each ``[stop - start]``, in nats. One query.

    NaN where a token was not sampled, or nothing was told.
    """
    found: dict[str, Floats] = {name: np.full(stop - start, np.nan, dtype=np.float32) for name in names}
    here = [step for step in _sampled(row, steps, start, stop) if step.has_entropy or step.n_alternatives]
    read = _read(here, (ENTROPY,) if set(names) <= {ENTROPY} else _ALL)
    for step in here:
        first = step.prompt_length
        a, b = max(first, start), min(first + step.completion_length, stop)
        for name, column in _columns(step, read[step.pk], names).items():
            part = column[a - first : b - first]
            found[name][a - start : a - start + len(part)] = part
    return found


def _columns(step: StepSummary, tokens: models.StepTokens, names: Collection[str]) -> dict[str, Floats]:
    """The columns ``names`` of a completion, each ``[C]``; those that it lacks are left out."""
    found = {ENTROPY: tokens.entropy} if ENTROPY in names else {}
    told = _told(step, tokens) if BEHIND in names or AT_LEAST in names else None
    if told is not None and BEHIND in names and tokens.logprobs is not None:
        found[BEHIND] = alternatives.behind_likeliest(told, tokens.logprobs)
    if told is not None and AT_LEAST in names and not step.has_entropy:
        found[AT_LEAST] = alternatives.entropy_at_least(told)
    return {name: column for name, column in found.items() if column is not None}


def _told(step: StepSummary, tokens: models.StepTokens) -> Alternatives | None:
    return alternatives.unpacked(tokens.alternative_ids, tokens.alternative_logprobs, step.completion_length)


@dataclass(frozen=True)
class SampledPart:
    """Tokens of a row that stand as a step with alternatives sampled them."""

    step: StepSummary
    start: int
    """Row offset of the first."""
    first: int
    """Its offset in the completion."""
    length: int


MAX_ALIGNED = 3_000_000
"""The most tokens of prompts and completions that are read to find sampled tokens in a row with tokens of its own."""


def parts_with_alternatives(
    trajectory: models.StoredTrajectory, row: RowSummary, steps: Sequence[StepSummary]
) -> list[SampledPart]:
    """The tokens of a row that have alternatives. No query, except for a row with tokens of its own whose steps have
    some: it is aligned with what they sampled, or has none where that is too long."""
    told = {step.index: step for step in steps if step.n_alternatives and step.index in row.steps}
    if row.follows_steps:
        return [SampledPart(step, step.prompt_length, 0, step.completion_length) for step in told.values()]
    if not told or sum(step.prompt_length + step.completion_length for step in steps) > MAX_ALIGNED:
        return []
    (value,) = load_trajectories([trajectory])
    place = trajectory.rows.filter(last_step=None, index__lt=row.index).count()
    found = sampled_in_row(value.steps, value.rows[place])
    return [SampledPart(told[step], start, first, n) for start, step, first, n in found if step in told]


def spans_with_alternatives(found: Iterable[SampledPart], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Start, stop and number of alternatives of each stretch of ``[start, stop)`` whose tokens have some. No query."""
    return [
        (max(part.start, start), min(part.start + part.length, stop), part.step.n_alternatives or 0)
        for part in found
        if part.start < stop and part.start + part.length > start
    ]


@dataclass(frozen=True, eq=False)
class TokenBeside:
    """What an engine told beside one token."""

    logprob: float | None
    """The log-probability that the step recorded for the token itself."""
    ids: Ids
    """``[K]``: the likeliest ids at its place, likeliest first."""
    logprobs: Floats
    """``[K]``, above minus infinity."""
    columns: Mapping[str, float]
    """The columns of the row at the token; a value that is not known is left out."""


def beside_token(found: Iterable[SampledPart], offset: int) -> TokenBeside | None:
    """What was told beside the token ``offset`` of a row; None = it has no alternatives. At most one query."""
    part = next((part for part in found if part.start <= offset < part.start + part.length), None)
    if part is None:
        return None
    step, at = part.step, part.first + offset - part.start
    tokens = _read([step], _ALL)[step.pk]
    told = _told(step, tokens)
    if told is None:
        return None
    columns = _columns(step, tokens, (ENTROPY, AT_LEAST, BEHIND))
    known = {name: float(column[at]) for name, column in columns.items() if np.isfinite(column[at])}
    own = None if tokens.logprobs is None or not np.isfinite(tokens.logprobs[at]) else float(tokens.logprobs[at])
    is_there = np.isfinite(told[1][at])
    return TokenBeside(own, told[0][at][is_there], told[1][at][is_there], known)


_ALL = ("logprobs", "entropy", "alternative_ids", "alternative_logprobs")


def _sampled(row: RowSummary, steps: Sequence[StepSummary], start: int, stop: int) -> list[StepSummary]:
    """The steps whose completions touch the tokens ``[start, stop)`` of a row."""
    if not row.follows_steps:
        return []
    return [
        step
        for step in steps
        if step.index in row.steps and step.prompt_length < stop and step.prompt_length + step.completion_length > start
    ]


def _read(steps: Sequence[StepSummary], names: Collection[str]) -> dict[int, models.StepTokens]:
    """The arrays ``names`` of steps, by the key of the step."""
    if not steps:
        return {}
    held = models.StoredStep.objects.filter(pk__in=[step.pk for step in steps])
    return {one.pk: one.tokens for one in steps_with_tokens(held, names)}
