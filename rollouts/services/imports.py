"""What an import writes beside trajectories: its progress, and the removal of a file that is not complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction

from rollouts import models
from rollouts.formats import Rejected
from rollouts.services.rejections import add_rejections
from rollouts.services.runs import delete_trajectories, recount
from rollouts.services.text import storable_text

IMPORTED = "imported"
"""In the run's settings: what is complete, so that an import that was killed goes on at the file it was at."""


def note_imported(run: models.Run, done: Mapping[str, Any], bytes_done: int) -> None:
    """Remember what is complete: ``done`` has the keys ``files``, ``next_index`` and ``formats``."""
    with transaction.atomic():
        held = models.Run.objects.select_for_update().get(pk=run.pk)
        held.settings[IMPORTED] = done
        held.format = ", ".join(done["formats"])[:200]
        held.bytes_done = bytes_done
        held.save(update_fields=["settings", "format", "bytes_done"])
    run.settings, run.format, run.bytes_done = held.settings, held.format, held.bytes_done


def drop_from(run: models.Run, index: int) -> None:
    """Remove what was stored of a file that is not complete: the trajectories from an index on."""
    dropped = False
    while keys := list(run.trajectories.filter(index__gte=index).values_list("pk", flat=True)[:200]):
        delete_trajectories(keys)
        dropped = True
    if dropped:
        recount(run)


def reject_file(run: models.Run, name: str, reason: str) -> None:
    """One rejection for a whole file, in place of those of its lines."""
    models.Rejection.objects.filter(run=run, file=storable_text(name[:500])).delete()
    add_rejections(run, name, [Rejected(None, reason)])
