"""The diagnosis of pushed trajectories: those that came since the last time, in small piles."""

from __future__ import annotations

from celery import shared_task
from django.db import transaction

from rollouts.models import Run, Trajectory

PILE = 20
JUDGED_TO = "judged_to"
"""In the run's settings: the key of the last trajectory that was judged. Keys of a run grow as it is stored."""


@shared_task(name="rollouts.judge_pushed")
def judge_pushed(run_id: int) -> None:
    """Judge what is new in a run. Delivered twice it leaves the same findings."""
    from rollouts.work.diagnosis import diagnose_and_save

    while True:
        run = Run.objects.select_related("tokenizer", "chat_template").filter(pk=run_id).first()
        if run is None:
            return
        last = int(run.settings.get(JUDGED_TO, 0))
        pile = list(Trajectory.objects.filter(run=run, pk__gt=last).order_by("pk")[:PILE])
        if not pile:
            return
        diagnose_and_save(run, pile)
        with transaction.atomic():
            held = Run.objects.select_for_update().get(pk=run_id)
            held.settings[JUDGED_TO] = max(int(held.settings.get(JUDGED_TO, 0)), pile[-1].pk)
            held.save(update_fields=["settings"])
