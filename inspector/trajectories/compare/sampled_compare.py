"""A recorded row against the stream that the model sampled, and against its row under the repaired chat template."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from django.urls import reverse

from inspector.html.inspector_tags import plural
from inspector.trajectories.compare.difference_words import mask_words
from inspector.trajectories.compare.side_by_side import (
    PairWords, TokenComparison, align_texts, compare, up_to, without_stray
)
from inspector.trajectories.frame import work_state
from inspector.trajectories.tokens import page_queries as data
from rollout_inspector.streams.align import AlignedGroup, align_ids, sampled_stream
from rollout_inspector.streams.trajectory import Mask, Origin, Tokens, plain_tokens
from rollout_inspector.text.html.tokens import TokenPainter
from rollouts.jobs.replays import trajectory_replays
from rollouts.store import models
from rollouts.store.trajectories.replays import stored_rows
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
    ``n_read``: the tokens of all prompts and completions. ``shown``: what :func:`compare` is told to draw."""
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
        int(np.count_nonzero(
            sampled[group.left_start : group.left_stop] & trained[group.right_start : group.right_stop]
        ))
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
        title=f"Row {row}: sampled stream against trained row", left="Sampled stream",
        left_note=f"{len(ids):,} tokens of its steps, {int(sampled.sum()):,} sampled", right="Trained row",
        right_note=f"{len(trained):,} tokens as recorded, {int(trained.sum()):,} trained", verdict=verdict,
        tone="no" if wrong or lost else "yes", masks="sampled on the left, trained on the right",
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


def repair_state(trajectory: models.StoredTrajectory) -> tuple[dict[str, Any], models.Replay | None]:
    """How far the search and the replay are, for the twin: ``state``, ``why``, ``progress`` and what was found."""
    state, replay, why = work_state(
        trajectory, trajectory_replays.missing, lambda: trajectory_replays.current(trajectory),
        live="A repair is tried when the trajectory has ended.",
        unasked="Nobody has tried the repair on this trajectory yet. Log in to try it.",
    )
    repair = None if replay is None else trajectory_replays.repair_of(replay)
    if state == "done" and repair is None:
        state = "unasked"
    progress = replay.job.progress if replay is not None and state == "running" else ""
    check = (repair or {}).get("check")
    return {
        "state": state, "why": why or None, "progress": progress,
        "check_url": reverse("check", args=[check]) + "#repair" if check else None, **(repair or {}),
    }, replay


def against_repair(
    trajectory: models.StoredTrajectory, rows: Sequence[RowSummary], row: int, repair: Mapping[str, Any],
    replay: models.Replay, painter: TokenPainter, notices: list[str], **shown: Any,
) -> tuple[TokenComparison, PairWords] | None:
    """Row ``row`` against the repaired row with its last step. ``shown``: what :func:`compare` is told to draw."""
    stored = stored_rows(replay, [repair["strategy"]]).get(repair["strategy"])
    if stored is None:
        notices.append("The rows under the repair are too many to be kept; only their figures are.")
        return None
    last = max(rows[row].steps, default=0)
    index = next((i for i, steps in enumerate(repair["row_steps"]) if last in steps), len(repair["row_steps"]) - 1)
    repaired = trajectory_replays.row_of(stored, index)
    assert repaired.origin is not None  # row_of fills it in
    n = up_to(max(rows[row].n_tokens, len(repaired.ids)), notices)
    recorded = data.read_tokens(trajectory, rows[row], 0, min(n, rows[row].n_tokens))
    right = Tokens(0, repaired.ids[:n], repaired.origin[:n], repaired.loss_mask[:n])
    groups = align_texts(recorded.ids, right.ids)
    comparison = compare(recorded, right, groups, painter, sampled=recorded.origin == Origin.SAMPLED, **shown)
    n_trained = sum(row_summary.n_trained for row_summary in rows)
    verdict = (
        f"{plural(len(rows), 'row')} as recorded, {n_trained:,} tokens trained; "
        f"{plural(repair['rows_count'], 'row')} with the repair, {repair['trained_tokens']:,} trained. "
        f"In row {row}: {comparison.words}{mask_words(recorded, right, groups)}"
    )
    return comparison, PairWords(
        title=f"Row {row}: as recorded, and with the repaired chat template", left=f"Row {row} as recorded",
        left_note=f"{rows[row].n_tokens:,} tokens, {rows[row].n_trained:,} trained",
        right=f"Row {index} with the repair",
        right_note=f"{len(repaired.ids):,} tokens, {repaired.n_trained:,} trained", verdict=verdict,
        tone="yes" if repair["rows_count"] < len(rows) else "",
        note="The completions and messages are the recorded ones; only the chat template is another.", masks="trained",
    )
