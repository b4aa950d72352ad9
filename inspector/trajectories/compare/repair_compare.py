"""A recorded row against the row that the same conversation makes under the repaired chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.urls import reverse

from inspector.html.tokens import TokenPainter
from inspector.trajectories.compare.difference_words import mask_words
from inspector.trajectories.compare.side_by_side import PairWords, TokenComparison, align_texts, compare, up_to
from inspector.trajectories.frame import work_state
from inspector.trajectories.tokens import page_queries as data
from rollout_inspector.streams.trajectory import Origin
from rollouts.jobs.replays import trajectory_replays
from rollouts.store import models
from rollouts.store.trajectories.replays import stored_rows
from rollouts.store.trajectories.rows import Tokens
from rollouts.store.trajectories.trajectory_parts import RowSummary


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


def against(
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
        f"{_rows(len(rows))} as recorded, {n_trained:,} tokens trained; {_rows(repair['rows_count'])} with the repair, "
        f"{repair['trained_tokens']:,} trained. In row {row}: {comparison.words}{mask_words(recorded, right, groups)}"
    )
    return comparison, PairWords(
        title=f"Row {row}: as recorded, and with the repaired chat template", left=f"Row {row} as recorded",
        left_note=f"{rows[row].n_tokens:,} tokens, {rows[row].n_trained:,} trained",
        right=f"Row {index} with the repair",
        right_note=f"{len(repaired.ids):,} tokens, {repaired.n_trained:,} trained", verdict=verdict,
        tone="yes" if repair["rows_count"] < len(rows) else "",
        note="The completions and messages are the recorded ones; only the chat template is another.", masks="trained",
    )


def _rows(n: int) -> str:
    return f"{n:,} row{'s' * (n != 1)}"
