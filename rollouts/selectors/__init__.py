"""Everything that reads the database. A page needs the same number of queries for data of every size."""

from rollouts.selectors.parameters import SORTS
from rollouts.selectors.rows import Span, get_row, row_columns, row_spans, row_window
from rollouts.selectors.runs import (
    GroupStats,
    RunFilters,
    RunSummary,
    RunTotals,
    count_running,
    failure_reasons,
    finding_kinds,
    group_stats,
    known_tags,
    list_rejections,
    run_summary,
    runs_with_codes,
    tags_of,
    total_runs,
    visible_runs,
)
from rollouts.selectors.trajectories import load_step_prompt, load_trajectories, load_trajectory
from rollouts.selectors.trajectory_filters import TrajectoryFilters, filter_trajectories
from rollouts.selectors.trajectory_list import (
    MAX_COUNTED,
    ListPart,
    count_before,
    count_trajectories,
    list_trajectories,
    neighbours,
    passes,
)
