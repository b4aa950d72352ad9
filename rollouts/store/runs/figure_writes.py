"""The figures of runs, counted when nothing changes them any more."""

from __future__ import annotations

from rollouts.store.models import Run, RunFigures
from rollouts.store.runs import figures
from rollouts.store.runs.policy_version_writes import take_policy_versions
from rollouts.store.runs.training_step_writes import take_training_steps


def take_figures(run: Run) -> None:
    """Count the figures of training steps and policy versions, and what the pages of a large run show.

    The pages of a small run are counted whenever they are looked at.
    """
    take_training_steps(run)
    take_policy_versions(run)
    now = Run.objects.filter(pk=run.pk).first()  # the caller's totals may be of a while ago
    if now is not None and figures.is_large(now):
        RunFigures.objects.update_or_create(
            run=now, defaults={"state": figures.state_of(now), "body": figures.count(now)}
        )
