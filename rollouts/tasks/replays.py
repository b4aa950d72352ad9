"""Replays in the background: to load a tokenizer and render a conversation many times does not fit into a request."""

from __future__ import annotations

from celery import shared_task

from rollouts.models import Replay
from rollouts.work import replays


@shared_task(name="rollouts.replay_trajectory")
def replay_trajectory(replay_id: int) -> None:
    """Make a stored replay; one that is done stays as it is, one that is gone is nobody's."""
    made = Replay.objects.filter(pk=replay_id).first()
    if made is not None and made.status in (Replay.Status.QUEUED, Replay.Status.RUNNING):
        replays.answer(made)


def order(made: Replay) -> None:
    """Send it to a worker; a broker that does not answer fails it with a sentence."""
    try:
        replay_trajectory.delay(made.pk)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        made.status = Replay.Status.FAILED
        made.error = (
            f"It could not be sent to a worker: Redis does not answer ({type(error).__name__}). "
            "Start it (make run starts an embedded one) and open this page again."
        )
        made.save(update_fields=["status", "error"])
