"""Rows of trajectories whose steps carry a trainer's columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Floats, Row, Step


def rows_with_columns(
    steps: Sequence[Step], columns: Sequence[Mapping[str, Floats]], names: Iterable[str]
) -> tuple[Row, ...]:
    """The rows that follow from the steps, with columns ``[T]``; empty where no step has a column. ``columns``: for
    each step the columns ``[C]`` of its completion. A token under the mask whose step has no such column has NaN. A
    token that nobody sampled has 0."""
    used = [name for name in names if any(name in row_columns for row_columns in columns)]
    rows = []
    for row in merged_rows(steps) if used else ():
        columns_of_row = {name: np.where(row.loss_mask, np.nan, 0.0).astype(np.float32) for name in used}
        for index in row.step_indices:
            start = len(steps[index].prompt_ids)
            for name, values in columns[index].items():
                columns_of_row[name][start : start + len(values)] = values
        rows.append(replace(row, columns=columns_of_row))
    return tuple(rows)
