"""What could not be read of a file or a push: kept with its reason, and counted."""

from collections.abc import Sequence

from django.db import transaction
from django.db.models import F

from rollout_inspector.formats import Rejected
from rollouts.store import models
from rollouts.store.text import storable_text

MAX_REJECTIONS = 1000  # Rejected lines of a run that are kept with their reason; beyond that they are only counted.


def add_rejections(run: models.Run, file: str, rejected: Sequence[Rejected]) -> None:
    """Keep the reasons as far as the run has room, and count all of them. ``file`` says where they come from."""
    if not rejected:
        return
    with transaction.atomic():
        # The update comes first: it locks the run, so two writers cannot both take the last room.
        models.Run.objects.filter(pk=run.pk).update(n_rejected=F("n_rejected") + len(rejected))
        room = max(MAX_REJECTIONS - models.Rejection.objects.filter(run=run).count(), 0)
        models.Rejection.objects.bulk_create(
            models.Rejection(
                run=run, file=storable_text(file[:500]), line=rejection.line, reason=storable_text(rejection.reason)
            )
            for rejection in rejected[:room]
        )


def list_rejections(run: models.Run, limit: int) -> list[models.Rejection]:
    """The first rejected lines of a run's files. One query, or none when every line was read."""
    return list(run.rejections.order_by("pk")[:limit]) if run.n_rejected else []
