"""Storing what an engine returns for the rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from django.db import transaction
from django.utils import timezone

from rollout_inspector.diagnose.gap.columns import compared_row
from rollout_inspector.diagnose.gap.figures import GapFigures, added, gap_of_rows
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Row
from rollouts.store.bulk import bare, insert_whole, reserve_keys
from rollouts.store.models import RowScores, Run, ScoredColumn
from rollouts.store.trajectories.columns import mark_of

Scored = tuple[int, Sequence[Row], Sequence[Floats]]
"""The primary key of a trajectory, its rows, and the scores ``[T]`` of each."""


def begin_column(
    run: Run, model: str, engine: str, engine_version: str, weights: str, user: Any = None, temperature: float = 1.0
) -> ScoredColumn:
    """The column of a run that this engine with these weights makes: the one that is there, or a new one."""
    names = {"model": model, "engine": engine[:60], "engine_version": engine_version[:60], "weights": weights[:64]}
    found, _ = ScoredColumn.objects.get_or_create(
        run=run, **names, temperature=temperature, defaults={"created_by": user}
    )
    return found


def keep_scores(column: ScoredColumn, found: Sequence[Scored]) -> None:
    """Put the scores of these trajectories in place of older ones. A trajectory that was deleted is left out.

    Raises ``ScoredColumn.DoesNotExist`` where somebody deleted the column.
    """
    keys = [key for key, _, _ in found]
    with transaction.atomic():
        # The job of a run is one at a time, but the column may have been deleted meanwhile.
        ScoredColumn.objects.select_for_update().get(pk=column.pk)
        RowScores.objects.filter(column=column, trajectory__in=keys).delete()
        locked = column.run.trajectories.select_for_update(of=("self",)).filter(pk__in=keys).order_by("pk")
        there = set(locked.values_list("pk", flat=True))
        kept = [one for one in found if one[0] in there]
        own = reserve_keys(RowScores, len(kept))
        insert_whole([_stored(next(own), column, *one) for one in kept])


def _stored(key: int, column: ScoredColumn, trajectory: int, rows: Sequence[Row], values: Sequence[Floats]) -> Any:
    gap = gap_of_rows([compared_row(row, row.logprobs, one) for row, one in zip(rows, values, strict=True)])
    return bare(
        RowScores,
        id=key,
        column_id=column.pk,
        trajectory_id=trajectory,
        rows=[number for row in rows for number in mark_of(row)],
        values=np.concatenate([NO_IDS.astype(np.float32), *values]),
        gap=None if gap is None else gap.to_json(),
    )


def end_column(column: ScoredColumn) -> None:
    """Sum the figures of a column and offer it. It may be called again when trajectories were added."""
    n, tokens, gaps = 0, 0, GapFigures()
    for gap, rows in column.scores.order_by("pk").values_list("gap", "rows").iterator(500):
        # Nothing stands before the first token of a row, so it has no score.
        n, tokens = n + 1, tokens + int(np.maximum(rows[::2] - 1, 0).sum())
        if gap is not None:
            gaps = added([gaps, GapFigures.from_json(gap)])
    column.n_trajectories, column.n_tokens, column.finished_at = n, tokens, timezone.now()
    column.gap = gaps.to_json() if gaps.tokens else None
    column.save(update_fields=["n_trajectories", "n_tokens", "finished_at", "gap"])


def delete_column(column: ScoredColumn) -> None:
    """Remove a column with its scores."""
    with transaction.atomic():
        held = RowScores.objects.filter(column=column)
        held._raw_delete(held.db)
        column.delete()
