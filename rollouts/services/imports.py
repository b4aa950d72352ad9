"""What an import writes beside trajectories: its progress, its end, and the removal of a file that is not complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from rollouts import models
from rollouts.formats import Rejected
from rollouts.selectors.activity import is_active
from rollouts.services.figures import take_figures
from rollouts.services.jobs import JobLost, end_job
from rollouts.services.rejections import add_rejections
from rollouts.services.runs import delete_trajectories, recount
from rollouts.services.text import without_paths

IMPORTED = "imported"
"""In the run's settings: what is complete, so that an import that was killed goes on at the file it was at."""
_NOTHING: dict[str, Any] = {"files": 0, "next_index": 0, "formats": [], "n_rejected": 0, "last_rejection": 0}

Alive = Callable[[], object]
"""Called in each transaction of an import. It raises :class:`JobLost` when the import is another worker's."""


def imported(run: models.Run) -> dict[str, Any]:
    """What is complete: ``files``, ``next_index``, ``formats``, ``n_rejected``, ``last_rejection`` (a key)."""
    return {**_NOTHING, **run.settings.get(IMPORTED, {})}


def has_partial_file(run: models.Run) -> bool:
    """Whether an import is under way and a part of the file that it reads is stored."""
    # Runs that are recorded or pushed have no bytes.
    return is_active(run) and run.bytes_total > 0 and run.n_trajectories > imported(run)["next_index"]


def note_imported(run: models.Run, done: Mapping[str, Any], bytes_done: int, alive: Alive = lambda: None) -> None:
    """Remember what is complete: ``done`` has the keys ``files``, ``next_index`` and ``formats``."""
    with transaction.atomic():
        alive()
        held = models.Run.objects.select_for_update().get(pk=run.pk)
        last = held.rejections.aggregate(last=Max("pk"))["last"] or 0
        held.settings[IMPORTED] = {**done, "n_rejected": held.n_rejected, "last_rejection": last}
        held.format = ", ".join(done["formats"])[:200]
        held.bytes_done = bytes_done
        held.save(update_fields=["settings", "format", "bytes_done"])
    run.settings, run.format, run.bytes_done = held.settings, held.format, held.bytes_done


def drop_incomplete(run: models.Run, alive: Alive = lambda: None) -> None:
    """Remove what was stored of a file that is not complete: its trajectories and its rejected lines."""
    done = imported(run)
    dropped = False
    while True:
        with transaction.atomic():
            alive()
            keys = list(run.trajectories.filter(index__gte=done["next_index"]).values_list("pk", flat=True)[:200])
            if keys:
                delete_trajectories(keys)
                dropped = True
                continue
            run.rejections.filter(pk__gt=done["last_rejection"]).delete()
            models.Run.objects.filter(pk=run.pk).update(n_rejected=done["n_rejected"])
            run.refresh_from_db(fields=["n_trajectories", "n_rejected"])
            # A worker may have been lost before it could count.
            if dropped or run.n_trajectories != run.trajectories.count():
                recount(run)
            return


def reject_file(run: models.Run, name: str, reason: str, alive: Alive = lambda: None) -> None:
    """One rejection for a whole file."""
    with transaction.atomic():
        alive()
        add_rejections(run, name, [Rejected(None, reason)])


def end_import(run: models.Run, job: models.Job, status: str, error: str = "") -> None:
    """End an import and its job together. Raises :class:`JobLost`."""
    with transaction.atomic():
        if not end_job(job, status, error):
            raise JobLost
        run.status, run.error, run.finished_at = status, without_paths(error), timezone.now()
        run.save(update_fields=["status", "error", "finished_at"])
    take_figures(run)
