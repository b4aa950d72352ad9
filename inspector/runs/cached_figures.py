"""The figures of a run for its pages: stored, counted now, or kept in the cache for a large run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.cache import cache

from rollouts.models import Run
from rollouts.selectors import RunSummary, run_summary
from rollouts.selectors.activity import is_active
from rollouts.selectors.figures import RunCost, cost_in, is_large, run_cost, state_of, stored_figures, summary_in

log = logging.getLogger(__name__)

LIVE_SECONDS = 20
"""The greatest age of a large run's counts while it works. Totals and progress are never cached."""
ENDED_SECONDS = 24 * 3600

T = TypeVar("T")


def summary_of(run: Run) -> RunSummary:
    """Counts, rewards, findings by kind. One query for a large run that has ended."""
    stored = stored_figures(run)
    return summary_in(stored) if stored is not None else _kept(run, "summary", lambda: run_summary(run))


def cost_of(run: Run, kind: str) -> RunCost:
    """What findings cost. One query for a large run that has ended."""
    stored = stored_figures(run)
    if stored is not None or kind not in ("", *run.finding_counts):
        return cost_in(stored, kind) if stored is not None else run_cost(run, kind)
    return _kept(run, f"cost:{kind}", lambda: run_cost(run, kind))


def _kept(run: Run, name: str, count: Callable[[], T]) -> T:
    """The counts of a small run are made now; those of a large run may come from the cache."""
    if not is_large(run):
        return count()
    live = is_active(run)
    key = f"figures:{run.pk}:{'' if live else state_of(run)}:{name}"
    held: Any = _quietly(lambda: cache.get(key))
    if held is None:
        held = count()
        _quietly(lambda: cache.set(key, held, LIVE_SECONDS if live else ENDED_SECONDS))
    found: T = held
    return found


def _quietly(ask: Callable[[], Any]) -> Any:
    """The page is drawn without Redis too."""
    try:
        return ask()
    except Exception as error:
        log.warning("figures not kept: %s", error)
        return None
