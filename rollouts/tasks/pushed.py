"""The diagnosis of pushed trajectories: those that came since the last time, in small piles."""

from __future__ import annotations

from celery import shared_task
from django.db import transaction

from rollouts.models import Run, StoredTrajectory

BATCH = 20
DIAGNOSED_TO = "judged_to"
"""In the run's settings: the key of the last trajectory that was judged. Keys of a run grow as it is stored."""


@shared_task(name="rollouts.judge_pushed")
def diagnose_pushed(run_id: int) -> None:
    """Judge what is new in a run. Delivered twice it leaves the same findings."""
    from rollouts.work.diagnosis import diagnose_and_save

    while True:
        run = Run.objects.select_related("tokenizer", "chat_template").filter(pk=run_id).first()
        if run is None:
            return
        last = int(run.settings.get(DIAGNOSED_TO, 0))
        batch = list(StoredTrajectory.objects.filter(run=run, pk__gt=last).order_by("pk")[:BATCH])
        if not batch:
            return
        diagnose_and_save(run, batch)
        with transaction.atomic():
            held = Run.objects.select_for_update().get(pk=run_id)
            held.settings[DIAGNOSED_TO] = max(int(held.settings.get(DIAGNOSED_TO, 0)), batch[-1].pk)
            held.save(update_fields=["settings"])
