"""The figures of large runs, counted when nothing changes them any more."""

from __future__ import annotations

from rollouts.models import Run, RunFigures
from rollouts.selectors import figures


def take_figures(run: Run) -> None:
    """Count what the pages of a large run show. A small one is counted whenever it is looked at."""
    now = Run.objects.filter(pk=run.pk).first()  # the caller's totals may be of a while ago
    if now is not None and figures.is_large(now):
        RunFigures.objects.update_or_create(
            run=now, defaults={"state": figures.state_of(now), "body": figures.count(now)}
        )
