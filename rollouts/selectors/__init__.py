"""Everything that reads the database. What a page calls costs the same number of queries whatever the size."""

from rollouts.selectors.rows import Span, Window, get_row, row_columns, row_spans, row_window
from rollouts.selectors.runs import (
    SORTS,
    GroupStats,
    Page,
    RewardBin,
    RunSummary,
    TrajectoryFilters,
    filter_trajectories,
    finding_kinds,
    group_stats,
    list_trajectories,
    neighbours,
    run_summary,
)
from rollouts.selectors.trajectories import load_step_prompt, load_trajectories, load_trajectory

__all__ = [
    "SORTS",
    "GroupStats",
    "Page",
    "RewardBin",
    "RunSummary",
    "Span",
    "TrajectoryFilters",
    "Window",
    "filter_trajectories",
    "finding_kinds",
    "get_row",
    "group_stats",
    "list_trajectories",
    "load_step_prompt",
    "load_trajectories",
    "load_trajectory",
    "neighbours",
    "row_columns",
    "row_spans",
    "row_window",
    "run_summary",
]
