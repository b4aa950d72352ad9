"""The values of a lens that is a column: of a trainer, of what an engine told, or the weight of a token in a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.frame import PageLink
from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens import page_queries as data
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.loss_weights.row_weights import loss_inputs, missing_words, row_weights
from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollout_inspector.streams.trajectory import Row
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import engine_columns as beside
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.groups import advantage_in_group
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_COLUMN_LINKS = 12
"""Columns of a row that are links of the lens switch; an address names the others."""
DEFAULT_RULE = "grpo"
"""The rule of the link *weight*."""


@dataclass(frozen=True)
class LensLink(PageLink):
    """A lens in its switch."""

    slug: str = ""
    """The value of ``lens`` in an address: the slug of a built-in lens, or the name of a trainer's column."""
    request: str = ""
    """When the browser asks the server for the page with this lens: see ``LensSpec.request``."""


@dataclass(frozen=True, eq=False)
class LensValues:
    """A column over a whole row."""

    values: NDArray[np.float32]
    """``[n]``; NaN = no value."""
    note: str = ""
    """Why it has no value at all, where the row lacks something; empty otherwise."""


def weight_lenses(columns: dict[int, list[str]]) -> dict[int, list[str]]:
    """Row index -> ``columns`` and the weights under each rule, of rows with a trainer's values."""
    return {
        row: [*(name for name in names if name not in _WEIGHTS), *_WEIGHTS] if any(map(_weighs, names)) else names
        for row, names in columns.items()
    }


_WEIGHTS = tuple(lenses.WEIGHT + rule for rule in RULES)


def _weighs(name: str) -> bool:
    return name in TRAINER_LOGPROBS or "advantage" in name


def lens_values(trajectory: StoredTrajectory, row: RowSummary, name: str, steps: Sequence[StepSummary]) -> LensValues:
    """A whole column of a row, because the scale of its colours is that of the row. At most four queries."""
    if name in _WEIGHTS:
        return _weights(trajectory, row, name, steps)
    if row.follows_steps:
        return LensValues(beside.columns_beside(row, steps, [name], 0, row.n_tokens)[name])
    return LensValues(data.read_values(trajectory, row, name))


def _weights(trajectory: StoredTrajectory, row: RowSummary, name: str, steps: Sequence[StepSummary]) -> LensValues:
    rule = RULES[name.removeprefix(lenses.WEIGHT)]
    names = [column_name for column_name in parts.column_names(trajectory).get(row.index, []) if _weighs(column_name)]
    tokens = data.read_tokens(trajectory, row, 0, row.n_tokens, steps)
    row_values = Row(
        tokens.ids, tokens.loss_mask, tokens.logprobs, columns=parts.column_values(trajectory, row.index, names)
    )
    weights = np.full(row.n_tokens, np.nan, dtype=np.float32)
    inputs = loss_inputs(row_values)
    if inputs is not None and not inputs.has_column:
        inputs = loss_inputs(row_values, advantage_in_group(trajectory))
    if inputs is None:
        return LensValues(weights, "the loss mask has another length than the ids")
    weights[inputs.offsets] = row_weights(inputs, rule).values
    lacks = [
        column_name for column_name in inputs.lacks if rule.needs_ratio or column_name not in ("sampler", "trainer")
    ]
    return LensValues(weights, f"the row lacks {missing_words(lacks)}" if lacks else "")


def weights_shown(
    trajectory: StoredTrajectory, row: RowSummary | None, lens: str, steps: Sequence[StepSummary], start: int, stop: int
) -> list[float | None] | None:
    """The weights of the tokens ``[start, stop)`` under the rule of a lens, six digits; None = it is another lens."""
    if row is None or lens not in _WEIGHTS:
        return None
    values = lens_values(trajectory, row, lens, steps).values[start:stop]
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def lens_links(place: PagePlace, url: str, columns: Sequence[str]) -> list[LensLink]:
    """The lens switch. The weights are one link, and one for each rule where one of them is shown."""
    lens_choices = [
        LensLink(lens.label, url + place.query(lens=lens.slug), lens.slug == place.lens, lens.slug, lens.request)
        for lens in lenses.LENSES
    ]
    column_names = [name for name in columns if name not in _WEIGHTS][:MAX_COLUMN_LINKS]
    links = [(name, lenses.column_label(name)) for name in column_names]
    if place.lens in _WEIGHTS:
        links += [(name, lenses.column_label(name)) for name in _WEIGHTS]
    elif _WEIGHTS[0] in columns:
        links.append((lenses.WEIGHT + DEFAULT_RULE, "weight"))
    return lens_choices + [
        LensLink(label, url + place.query(lens=name), name == place.lens, name, "always") for name, label in links
    ]
