"""Two rollouts side by side: the rows of a trajectory against those of another, of its group or of another run."""

from collections.abc import Sequence
from typing import Any

from inspector.trajectories.compare.side_by_side import PairWords, TokenComparison, align_texts, compare, up_to
from inspector.trajectories.frame import PageLink
from inspector.trajectories.tokens import page_queries as data
from rollout_inspector.streams.trajectory import plain_tokens
from rollout_inspector.text.html.tokens import TokenPainter
from rollouts.store import models
from rollouts.store.trajectories.trajectory_parts import RowSummary

MAX_OTHERS = 512  # The most trajectories of the group that are offered.
MAX_ROWS = 40  # The most rows of each side that are offered.


def choices(
    trajectory: models.StoredTrajectory, others: Sequence[models.StoredTrajectory],
    chosen: models.StoredTrajectory | None,
) -> list[PageLink]:
    return [
        PageLink(
            f"{choice.external_id[:40]}{_reward(choice)}{_run(trajectory, choice)}", f"?with={choice.code}",
            choice == chosen,
            heading="This trajectory, against one of another run:" if choice.run_id != trajectory.run_id
            else "This trajectory, against another of its run:",
        )
        for choice in others
    ]


def _run(trajectory: models.StoredTrajectory, other: models.StoredTrajectory) -> str:
    return f", of {other.run.name[:40]}" if other.run_id != trajectory.run_id else ""


def longest(rows: Sequence[RowSummary]) -> int:
    """The row with the most tokens, the first of several: that of the main conversation where sub-agents have rows."""
    return max(range(len(rows)), key=lambda index: (rows[index].n_tokens, -index))


def against(
    trajectory: models.StoredTrajectory, rows: Sequence[RowSummary], row: int, other: models.StoredTrajectory,
    there: Sequence[RowSummary], right_row: int, painter: TokenPainter, notices: list[str], **shown: Any,
) -> tuple[TokenComparison, PairWords]:
    """Row ``row`` against a row of the other. ``shown``: what :func:`compare` is told to draw."""
    left, right = rows[row], there[right_row]
    if other.run_id != trajectory.run_id and other.run.tokenizer_id != trajectory.run.tokenizer_id:
        notices.append("The two runs have different tokenizers: both sides are drawn with that of the left one.")
    n = up_to(max(left.n_tokens, right.n_tokens), notices)
    ids = data.read_tokens(trajectory, left, 0, min(n, left.n_tokens)).ids
    others = data.read_tokens(other, right, 0, min(n, right.n_tokens)).ids
    comparison = compare(plain_tokens(ids), plain_tokens(others), align_texts(ids, others), painter, **shown)
    first = comparison.site_places[0] if comparison.n_sites else 0
    shared = f"The first {first:,} token{'s are' if first != 1 else ' is'} the same. " if first else ""
    return comparison, PairWords(
        title=f"{trajectory.external_id[:80]} against {other.external_id[:80]}",
        left=_name(trajectory, left, len(rows)), left_note=f"{left.n_tokens:,} tokens, {left.n_trained:,} trained",
        right=f"{_name(other, right, len(there))}{_run(trajectory, other)}",
        right_note=f"{right.n_tokens:,} tokens, {right.n_trained:,} trained", verdict=f"{shared}{comparison.words}",
    )


def row_choices(
    rows: Sequence[RowSummary], row: int, other: models.StoredTrajectory, there: Sequence[RowSummary], right_row: int
) -> list[PageLink]:
    """The rows of both that can be chosen; none where each has one alone."""
    pairs = [(row_of_side.index, right_row) for row_of_side in rows[:MAX_ROWS]] + [
        (row, row_of_side.index) for row_of_side in there[:MAX_ROWS]
    ]
    heading = "A row of this trajectory, against a row of the other:"
    return [
        PageLink(
            f"row {pair[0]} against row {pair[1]}", f"?with={other.code}&row={pair[0]}&right_row={pair[1]}",
            pair == (row, right_row), heading=heading,
        )
        for pair in sorted(set(pairs))
    ] if len(rows) > 1 or len(there) > 1 else []


def _name(trajectory: models.StoredTrajectory, row: RowSummary, n_rows: int) -> str:
    of = f", row {row.index} of {n_rows}" if n_rows > 1 else ""
    return f"{trajectory.external_id[:80]}{_reward(trajectory)}{of}"


def _reward(trajectory: models.StoredTrajectory) -> str:
    return "" if trajectory.reward is None else f", reward {trajectory.reward:.4g}"
