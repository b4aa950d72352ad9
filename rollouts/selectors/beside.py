"""What an engine told beside the tokens of a row that follows from its steps: entropy and alternatives, as columns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollouts import models
from rollouts.selectors.parts import RowSummary, StepSummary
from rollouts.tito import alternatives
from rollouts.tito.alternatives import Alternatives
from rollouts.tito.trajectory import Floats, Ids
from rollouts.token_store.reading import steps_with_tokens

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


def spans_with_alternatives(
    row: RowSummary, steps: Sequence[StepSummary], start: int, stop: int
) -> list[tuple[int, int, int]]:
    """Start, stop and number of alternatives of each stretch of ``[start, stop)`` whose tokens have some. No query."""
    return [
        (max(step.prompt_length, start), min(step.prompt_length + step.completion_length, stop), step.n_alternatives)
        for step in _sampled(row, steps, start, stop)
        if step.n_alternatives
    ]


@dataclass(frozen=True, eq=False)
class TokenBeside:
    """What an engine told beside one token."""

    ids: Ids
    """``[K]``: the likeliest ids at its place, likeliest first."""
    logprobs: Floats
    """``[K]``, above minus infinity."""
    columns: Mapping[str, float]
    """The columns of the row at the token; a value that is not known is left out."""


def beside_token(row: RowSummary, steps: Sequence[StepSummary], offset: int) -> TokenBeside | None:
    """What was told beside the token ``offset`` of a row; None = it has no alternatives. At most one query."""
    step = next((step for step in _sampled(row, steps, offset, offset + 1) if step.n_alternatives), None)
    if step is None:
        return None
    tokens = _read([step], _ALL)[step.pk]
    told, at = _told(step, tokens), offset - step.prompt_length
    if told is None:
        return None
    columns = _columns(step, tokens, (ENTROPY, AT_LEAST, BEHIND))
    known = {name: float(column[at]) for name, column in columns.items() if np.isfinite(column[at])}
    is_there = np.isfinite(told.logprobs[at])
    return TokenBeside(told.ids[at][is_there], told.logprobs[at][is_there], known)


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
