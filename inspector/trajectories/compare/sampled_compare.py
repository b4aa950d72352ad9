"""The stream that the model sampled against a recorded row, each with its loss mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from inspector.trajectories.compare.side_by_side import PairWords, TokenComparison, compare, up_to, without_stray
from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.row_places import sampled_stream
from rollout_inspector.streams.trajectory import Mask, plain_tokens
from rollout_inspector.text.html.tokens import TokenPainter
from rollouts.store import models
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary

MAX_READ = 10_000_000
"""The most tokens of prompts and completions that one request reads. Each prompt holds what came before it."""


def can_compare(row: RowSummary) -> bool:
    """Whether the row was recorded beside steps: else it holds their streams as they are, or nothing is known."""
    return not row.follows_steps and bool(row.steps)


def against(
    trajectory: models.StoredTrajectory, rows: list[RowSummary], row: int, painter: TokenPainter, notices: list[str],
    n_read: int, **shown: Any,
) -> tuple[TokenComparison, PairWords] | None:
    """The sampled stream of the row's steps, and the row. None and a notice when there is nothing to compare.

    ``n_read``: the tokens of all prompts and completions. ``shown``: what :func:`compare` is told to draw.
    """
    if n_read > MAX_READ:
        notices.append(
            f"The steps of this trajectory forward {n_read:,} tokens; at most {MAX_READ:,} are read to compare a row "
            "with what was sampled. Choose a step."
        )
        return None
    (value,) = load_trajectories([trajectory])
    own = dict(zip([group.index for group in rows if not group.follows_steps], value.rows, strict=True))
    stream = sampled_stream(value.steps, own[row])
    if stream is None or len(own[row].loss_mask) != len(own[row].ids):
        notices.append(f"Row {row} names no step, or its loss mask has another length: nothing can be compared.")
        return None
    n = up_to(max(len(stream[0]), len(own[row].ids)), notices)
    ids, sampled = stream[0][:n], stream[1][:n]
    row_ids, trained = own[row].ids[:n], np.asarray(own[row].loss_mask[:n], dtype=np.bool_)
    groups = align_ids(ids, row_ids)
    both = sum(
        int(
            np.count_nonzero(
                sampled[group.left_start : group.left_stop] & trained[group.right_start : group.right_stop]
            )
        )
        for group in groups
        if group.equal
    )
    wrong, lost = int(trained.sum()) - both, int(sampled.sum()) - both
    sides = plain_tokens(ids, mask=sampled), plain_tokens(row_ids, mask=trained)
    comparison = compare(*sides, _by_mask(without_stray(ids, row_ids, groups), sampled, trained), painter,
                         sampled=sampled, **shown)
    if wrong or lost:
        verdict = (
            f"{comparison.words} So the row trains {wrong:,} token{'s' * (wrong != 1)} that the model did not sample "
            f"there, and does not train {lost:,} that it sampled."
        )
    elif comparison.n_sites:
        verdict = f"{comparison.words} But the row trains what was sampled, {both:,} tokens."
    else:
        verdict = f"This row trains exactly what was sampled: {both:,} tokens."
    return comparison, PairWords(
        title=f"Row {row}: sampled stream against trained row",
        left="Sampled stream",
        left_note=f"{len(ids):,} tokens of its steps, {int(sampled.sum()):,} sampled",
        right="Trained row",
        right_note=f"{len(trained):,} tokens as recorded, {int(trained.sum()):,} trained",
        verdict=verdict,
        tone="no" if wrong or lost else "yes",
        masks=True,
    )


def _by_mask(groups: Iterable[AlignedGroup], sampled: Mask, trained: Mask) -> Iterator[AlignedGroup]:
    """The groups; equal tokens with another mask differ."""
    for group in groups:
        if not group.equal:
            yield group
            continue
        same = sampled[group.left_start : group.left_stop] == trained[group.right_start : group.right_stop]
        edges = [0, *(np.flatnonzero(np.diff(same)) + 1).tolist(), len(same)]
        for a, b in itertools.pairwise(edges):
            start, other = group.left_start, group.right_start
            yield AlignedGroup(start + a, start + b, other + a, other + b, bool(same[a]))
