"""The figures of a run for its pages: stored, counted now, or kept in the cache for a large run."""

from collections.abc import Callable
from typing import TypeVar

from inspector.server.page_cache import keep, recall
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run
from rollouts.store.runs.figures import (
    RunCost, TrainedTotals, cost_in, is_large, run_cost, run_totals, state_of, stored_figures, summary_in
)
from rollouts.store.runs.run_summary import RunSummary, run_summary

LIVE_SECONDS = 20  # The greatest age of a large run's counts while it works. Totals and progress are never cached.
ENDED_SECONDS = 24 * 3600

T = TypeVar("T")


def summary_of(run: Run) -> RunSummary:
    """Counts, rewards, findings by kind. One query for a large run that has ended."""
    stored = stored_figures(run)
    return summary_in(stored) if stored is not None else _kept(run, "summary", RunSummary, lambda: run_summary(run))


def cost_of(run: Run, kind: str) -> RunCost:
    """What findings cost. One query for a large run that has ended."""
    stored = stored_figures(run)
    if stored is not None or kind not in ("", *run.finding_counts):
        return cost_in(stored, kind) if stored is not None else run_cost(run, kind)
    return _kept(run, f"cost:{kind}", RunCost, lambda: run_cost(run, kind))


def totals_of(run: Run) -> TrainedTotals:
    """What the rows train. One query."""
    stored = stored_figures(run)
    return (
        cost_in(stored, "").totals
        if stored is not None
        else _kept(run, "totals", TrainedTotals, lambda: run_totals(run))
    )


def _kept(run: Run, name: str, kind: type[T], count: Callable[[], T]) -> T:
    """The counts of a small run are made now; those of a large run may come from the cache."""
    if not is_large(run):
        return count()
    live = is_active(run)
    key = f"figures:{run.pk}:{'' if live else state_of(run)}:{name}"
    figures = recall(key, kind)
    if figures is None:
        figures = count()
        keep(key, figures, LIVE_SECONDS if live else ENDED_SECONDS)
    return figures
