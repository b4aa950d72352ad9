"""The tokens page as JSON: a row of a trajectory with its turns, its findings and a window of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inspector.runs.muted import MutedValues
from inspector.trajectories.discussion import CommentValues
from inspector.trajectories.frame import TrajectoryHead, head_of
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.findings import DrawnFinding
from inspector.trajectories.tokens.lane_tree import LaneTree, lane_tree
from inspector.trajectories.tokens.token_view import TokenView
from inspector.trajectories.tokens.token_window import window_tokens
from inspector.trajectories.tokens.turns import Turn
from rollout_inspector.diagnose.checks import totals
from rollouts.store.models import StoredTrajectory

OUTCOMES = ("failed", "noted", "passed", "not decidable")


@dataclass(frozen=True)
class TrajectoryPage(TrajectoryHead):
    """The tokens page as JSON. In each view, the tokens are those of the window that the address names."""

    group: str
    """The name of the group. Trajectories of one group answer the same prompt."""
    n_steps: int
    """Requests to the engine."""
    n_rows: int
    """Rows that are stored."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""
    rows: list[dict[str, int]]
    """``index``, ``n_tokens`` and ``n_trained`` of all rows; of those that the steps make so far, where none is stored
    yet."""
    row: dict[str, int] | None
    """The row that the address names; None when there is no row."""
    lenses: list[str]
    """Values of ``lens`` in an address of this row."""
    mark: tuple[int, int] | None
    """Tokens ``[start, stop)`` that the address marks."""
    turns: list[Turn]
    """The turns of the row."""
    findings: list[DrawnFinding]
    """All findings of the trajectory, in reading order."""
    muted: list[MutedValues]
    """The rules that mute some of these findings."""
    checks: list[dict[str, Any]] | None
    """What the diagnosis checked. None = not known: it has not run, or an earlier version ran."""
    comments: list[CommentValues] | None
    """What people say of it, in reading order; null for the visitor of a share link."""
    lanes: LaneTree | None
    """The chains of steps, and where each leaves another one; None where the steps form one chain."""
    seen: bool | None
    """The reader has marked it as seen; null for the visitor of a share link."""
    window: dict[str, Any]
    """``start``, ``stop`` and at most 4096 ``tokens`` of the row, with every field."""


def trajectory_page(view: TokenView) -> TrajectoryPage:
    """The page as JSON."""
    trajectory, place, discussion = view.trajectory, view.place, view.discussion
    rows = [{"index": row.index, "n_tokens": row.n_tokens, "n_trained": row.n_trained} for row in view.rows]
    kinds = {item.kind for item in view.findings}
    return TrajectoryPage(
        **head_of(trajectory),
        group=trajectory.group,
        n_steps=trajectory.n_steps,
        n_rows=trajectory.n_rows,
        notices=[*place.notices, *([f"No text: {view.text_missing}"] if view.text_missing else [])],
        rows=rows,
        row=rows[place.row] if rows else None,
        lenses=[*(lens.slug for lens in lenses.LENSES), *view.row_lenses],
        mark=place.mark,
        turns=view.turns,
        findings=view.findings,
        muted=[rule for rule in discussion.muted if rule.kind in kinds],
        checks=check_lines(trajectory),
        comments=discussion.comments,
        lanes=lane_tree(trajectory, view.lanes, view.rows),
        seen=discussion.seen,
        window={
            "start": view.tokens.start,
            "stop": view.tokens.stop,
            "tokens": window_tokens(view.tokens, view.table, view.turns, view.row_findings),
        },
    )


def check_lines(trajectory: StoredTrajectory) -> list[dict[str, Any]] | None:
    """Name and outcome of each check of the diagnosis, its claim, and the fields that it lacked."""
    if trajectory.checks is None:
        return None
    lines = [
        {
            "name": total.name,
            "claim": total.claim,
            "outcome": trajectory.checks[total.name] if total.checked else "not decidable",
            "needs": total.needs,
        }
        for total in totals([(trajectory.checks, 1)])
    ]
    return sorted(lines, key=lambda line: OUTCOMES.index(line["outcome"]))
