"""Writing trajectories that a trainer pushes: each external id once, however often it is sent."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from rollouts import models
from rollouts.services.runs import MOST_REJECTIONS
from rollouts.services.trajectories import TokenTable, save_trajectories
from rollouts.tito.trajectory import Trajectory


def add_new_trajectories(
    run: models.Run, trajectories: Sequence[Trajectory], token_table: TokenTable | None = None
) -> tuple[list[models.Trajectory], int]:
    """Store those whose external id the run does not have; gives them, and how many it has already. One transaction."""
    with transaction.atomic():
        # Pushes to one run queue here, so that two of them agree on what is known and on the next index.
        models.Run.objects.select_for_update().get(pk=run.pk)
        wanted = [trajectory.external_id for trajectory in trajectories]
        known = set(run.trajectories.filter(external_id__in=wanted).values_list("external_id", flat=True))
        fresh = [trajectory for trajectory in trajectories if trajectory.external_id not in known]
        return save_trajectories(run, fresh, token_table=token_table), len(trajectories) - len(fresh)


def add_rejections(run: models.Run, source: str, rejected: Sequence[tuple[int | None, str]]) -> None:
    """Keep (line, reason) of what was not read, as far as the run has room for; the rest is counted."""
    if not rejected:
        return
    room = max(MOST_REJECTIONS - models.Rejection.objects.filter(run=run).count(), 0)
    models.Rejection.objects.bulk_create(
        models.Rejection(run=run, file=source, line=line, reason=reason.replace("\0", "␀"))
        for line, reason in rejected[:room]
    )
    models.Run.objects.filter(pk=run.pk).update(n_rejected=F("n_rejected") + len(rejected))


def note_push(run: models.Run, format_name: str) -> None:
    """After a push the run is as complete as it can be known to be, and names every format it was fed with."""
    with transaction.atomic():
        held = models.Run.objects.select_for_update().get(pk=run.pk)
        names = held.format.split(", ") if held.format else []
        if format_name and format_name not in names:
            held.format = ", ".join([*names, format_name])[:200]
        if held.status not in (
            models.Run.Status.QUEUED,
            models.Run.Status.RUNNING,
        ):  # else a worker or recorder ends it
            held.status, held.finished_at = models.Run.Status.DONE, timezone.now()
            held.started_at = held.started_at or held.finished_at
        held.save(update_fields=["format", "status", "finished_at", "started_at"])
