"""Keeps the figures of training steps: they are counted again when trajectories of a step have changed."""

from __future__ import annotations

from collections.abc import Collection

from django.db import transaction

from rollouts.store.models import Run, TrainingStepFigures
from rollouts.store.runs.alarm_writes import take_alarms
from rollouts.store.runs.training_steps import count_training_steps, has_training_steps


def take_training_steps(run: Run, steps: Collection[int] | None = None) -> None:
    """Count the figures of these training steps of a run again; None = of all. Counting is read, so it may be repeated.

    The alarms of the run are checked by the new figures.

    Two workers may count the same step at once. Each replaces whole figures, and the last to be asked counts last.
    """
    stored = TrainingStepFigures.objects.filter(run=run)
    is_any = steps is not None or has_training_steps(run)
    if not is_any and not stored.exists():
        return
    found = count_training_steps(run, steps) if is_any else []
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        (stored if steps is None else stored.filter(training_step__in=steps)).delete()
        TrainingStepFigures.objects.bulk_create(found, batch_size=200)
        take_alarms(run)
