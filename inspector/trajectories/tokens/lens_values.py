"""The values of a lens that is a column: of a trainer, of what an engine told, or the weight of a token in a loss."""

from collections.abc import Sequence
from itertools import pairwise, starmap

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.frame import PageLink
from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens import lenses, page_queries as data
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.gap.report import DECODE, KEPT, PARTS, SAMPLED, TRAINER, between, parts_of
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.diagnose.loss_weights.row_weights import loss_inputs, missing_words, row_weights
from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollout_inspector.streams.trajectory import Row
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.damage import token_norms
from rollouts.store.runs.logprob_columns import load_compared, passes_of
from rollouts.store.trajectories import engine_columns as beside, trajectory_parts as parts
from rollouts.store.trajectories.groups import advantage_in_group
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_COLUMN_LINKS = 12  # Columns of a row that are links of the lens switch; an address names the others.
DEFAULT_RULE = "grpo"  # The rule of the link *weight*.


LensValues = tuple[NDArray[np.float32], str]
"""A column ``[n]`` over a whole row, NaN = no value, and what the row lacks of it, where it has no value at all."""


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
    """A whole column of a row: the scale of its colours is that of the row. A fixed number of queries."""
    if name in _WEIGHTS:
        return _weights(trajectory, row, name, steps)
    if name == lenses.GRADIENT:
        norms = token_norms(trajectory, row.index, row.n_tokens)
        nothing = np.full(row.n_tokens, np.nan, dtype=np.float32)
        return (nothing, "the row has changed since it was measured") if norms is None else (norms, "")
    if name.startswith(lenses.PART):
        return _part_of_gap(trajectory, row, name.removeprefix(lenses.PART), steps)
    if row.follows_steps:
        return beside.columns_beside(row, steps, [name], 0, row.n_tokens)[name], ""
    return data.read_values(trajectory, row, name), ""


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
        return weights, "the loss mask has another length than the ids"
    weights[inputs.offsets] = row_weights(inputs, rule).values
    lacks = [
        column_name for column_name in inputs.lacks if rule.needs_ratio or column_name not in ("sampler", "trainer")
    ]
    return weights, f"the row lacks {missing_words(lacks)}" if lacks else ""


def lens_links(place: PagePlace, url: str, columns: Sequence[str]) -> list[PageLink]:
    """The lens switch. The weights are one link, and one for each rule where one of them is shown. The note of a link
    says when the browser asks the server for the page with this lens: see ``LensSpec.request``."""
    lens_choices = [(lens.slug, lens.label, lens.request) for lens in lenses.LENSES]
    column_names = [name for name in columns if name not in _WEIGHTS][:MAX_COLUMN_LINKS]
    links = [(name, lenses.column_label(name)) for name in column_names]
    if place.lens in _WEIGHTS:
        links += [(name, lenses.column_label(name)) for name in _WEIGHTS]
    elif _WEIGHTS[0] in columns:
        links.append((lenses.WEIGHT + DEFAULT_RULE, "weight"))
    lens_choices += [(name, label, "always") for name, label in links]
    return [
        PageLink(label, url + place.query(lens=slug), slug == place.lens, slug, note)
        for slug, label, note in lens_choices
    ]


def part_lenses(trajectory: StoredTrajectory) -> list[str]:
    """The lenses of the parts of the gap, where engines replayed the run. At most one query."""
    replays = passes_of(trajectory.run)[0] if trajectory.gap else []
    names = {SAMPLED, KEPT, DECODE, TRAINER, *starmap(between, pairwise(replays))}
    return [lenses.PART + name for name in PARTS if name in names] if replays else []


def _part_of_gap(trajectory: StoredTrajectory, row: RowSummary, part: str, steps: Sequence[StepSummary]) -> LensValues:
    replays, masses = passes_of(trajectory.run)
    names = [name for replay in replays for name in (replay.prefill, replay.decode)]
    (value,) = load_compared([trajectory], more=[*names, masses])
    ids = data.read_tokens(trajectory, row, 0, row.n_tokens, steps).ids
    collector = GapCollector(more=names, kept=masses)
    collector.add(value, [(row.index, compared) for compared in value.rows if np.array_equal(compared.ids, ids)][:1])
    tokens, values = collector.done(), np.full(row.n_tokens, np.nan, dtype=np.float32)
    values[tokens.offset] = parts_of(tokens, replays).get(part, np.nan)
    return values, "" if len(tokens) else "no token of the row has a trainer's log-probability"
