"""Two columns of log-probabilities held against each other, whoever made them: sampler, trainer, or an engine later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Floats, Row, Trajectory

SAMPLER = "sampler"
"""The name of the column that the sampler recorded."""
SCORED = "scored:"
"""The names of columns that an engine made later begin so; the code of the column follows."""


def rows_of(value: Trajectory) -> tuple[Row, ...]:
    """The rows of a trajectory: those that the source holds, or else those that follow from its steps."""
    return value.rows or tuple(merged_rows(value.steps))


def column_of(row: Row, name: str) -> Floats | None:
    """A recorded column ``[T]`` of a row: :data:`SAMPLER` or the name of a trainer's column. None = it has none."""
    return row.logprobs if name == SAMPLER else row.columns.get(name)


def compared_row(row: Row, sampler: Floats | None, trainer: Floats | None) -> Row:
    """The row with these two columns ``[T]`` in place of those of sampler and trainer; None = none.

    ``rollout_inspector.diagnose.gap.figures`` compares the result as it compares a recorded row.
    """
    columns = {name: values for name, values in row.columns.items() if name not in TRAINER_LOGPROBS}
    if trainer is not None:
        columns[TRAINER_LOGPROBS[0]] = trainer
    return replace(row, logprobs=sampler, columns=columns)


def recorded_columns(rows: Sequence[Row]) -> list[str]:
    """The names of the recorded columns of log-probabilities that any row has: the sampler's first."""
    names = [SAMPLER] if any(row.logprobs is not None for row in rows) else []
    return names + [name for name in TRAINER_LOGPROBS if any(name in row.columns for row in rows)]
