"""Keeps the figures by training step and policy version while data is pushed, at most once in some seconds for a run.
Each push may bring a few trajectories of a step, and counting a step reads all of it. So a push that comes soon after
the last count is counted later: by the next one, or by the clock of the workers."""

from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from rollouts.store.models import PushedFigures, Run
from rollouts.store.runs.policy_versions import first_place_of, take_policy_versions, versions_of
from rollouts.store.runs.training_steps import stored_after, take_training_steps
from rollouts.store.trajectories.pushed_trajectories import DIAGNOSED_TO

COUNT_SECONDS = 5.0  # The figures of a run are counted again at most so often while data is pushed to it.
LOST_SECONDS = 300.0  # A count that took longer was lost with its worker, and is begun again.
MAX_PLACES = 50_000
"""Versions whose trajectories are further apart in their run are counted when it is diagnosed as a whole."""


def note_uncounted(run: Run, counted_to: int) -> None:
    """Remember that pushed trajectories were diagnosed and are not counted. Call it after they were stored.
    ``counted_to``: the key of the last trajectory that was diagnosed before, for a run that was never pushed to."""
    now = timezone.now()
    figures, is_new = PushedFigures.objects.get_or_create(run=run, defaults={"counted_to": counted_to, "due_at": now})
    if not is_new and figures.due_at is None:
        PushedFigures.objects.filter(run=run, due_at=None).update(due_at=max(now, _next(figures)))


def _next(held: PushedFigures) -> datetime:
    """When the figures may be counted again."""
    last = held.counted_at
    return timezone.now() if last is None else last + timedelta(seconds=COUNT_SECONDS)


def count_due(run: Run | None = None) -> int:
    """Count what was pushed to a run, or to any, and is due. Returns the number of runs that were counted."""
    now = timezone.now()
    far = now + timedelta(seconds=COUNT_SECONDS + LOST_SECONDS)  # written before the clock was set back
    due = PushedFigures.objects.filter(Q(due_at__lte=now) | Q(due_at__gt=far)).select_related("run")
    return sum(_count(figures) for figures in (due if run is None else due.filter(run=run)))


def _count(held: PushedFigures) -> bool:
    """Count what was pushed since the last count. False: another worker does."""
    mine = PushedFigures.objects.filter(run=held.run_id, due_at=held.due_at)
    if not mine.update(due_at=timezone.now() + timedelta(seconds=LOST_SECONDS)):
        return False
    run = Run.objects.get(pk=held.run_id)
    to = int(run.settings.get(DIAGNOSED_TO, 0))
    new = stored_after(run, held.counted_to).filter(pk__lte=to).values_list("pk", "index", "training_step")
    keys, places, training_steps = zip(*new, strict=True) if new else ((), (), ())
    if steps := {step for step in training_steps if step is not None}:
        take_training_steps(run, steps)
    if versions := versions_of(run, keys):
        counted = first_place_of(run, versions)
        first = min(places) if counted is None else min(counted, *places)
        if run.n_trajectories - first <= MAX_PLACES:
            take_policy_versions(run, versions, first)
    with transaction.atomic():  # what was diagnosed meanwhile is due next, whoever comes first
        now = Run.objects.select_for_update(no_key=True).get(pk=run.pk)
        done = PushedFigures(run=run, counted_to=to, counted_at=timezone.now(), due_at=None)
        if int(now.settings.get(DIAGNOSED_TO, 0)) > to:
            done.due_at = _next(done)
        done.save()
    return True
