"""What an import writes beside trajectories: its progress, its end, and the removal of a file that is not complete."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from django.db import connection, transaction
from django.db.models import Max, QuerySet, Sum
from django.utils import timezone

from rollout_inspector.formats import Rejected
from rollouts.store import models
from rollouts.store.bulk import change_whole
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.jobs import JobLost, end_job
from rollouts.store.runs.rejections import MAX_REJECTIONS, add_rejections
from rollouts.store.runs.runs import beat, delete_trajectories, recount, take_figures
from rollouts.store.text import without_paths
from rollouts.store.trajectories.trajectories import last_index

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


def begin_parts(run: models.Run, bytes_total: int) -> None:
    """Remember that any workers read parts of the files, until :func:`note_imported`."""
    run.settings[IMPORTED], run.bytes_total = imported(run) | {"in_parts": True}, bytes_total
    run.save(update_fields=["settings", "bytes_total"])


def is_read_in_parts(run: models.Run) -> bool:
    """Whether workers read parts of the files of a run now. What they reject is listed when all have ended."""
    return is_active(run) and bool(imported(run).get("in_parts"))


def note_imported(run: models.Run, done: Mapping[str, Any], bytes_done: int, alive: Alive = lambda: None) -> None:
    """Remember what is complete: ``done`` has the keys ``files``, ``next_index`` and ``formats``."""
    with transaction.atomic():
        alive()
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        last = locked.rejections.aggregate(last=Max("pk"))["last"] or 0
        locked.settings[IMPORTED] = {**done, "n_rejected": locked.n_rejected, "last_rejection": last}
        locked.format = ", ".join(done["formats"])[:200]
        locked.bytes_done = bytes_done
        locked.save(update_fields=["settings", "format", "bytes_done"])
    run.settings, run.format, run.bytes_done = locked.settings, locked.format, locked.bytes_done


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


def drop_all(run: models.Run, job: models.Job, alive: Alive) -> None:
    """Remove all that an import in shards has stored, and its shards: the next try reads every file again."""
    with transaction.atomic():
        alive()
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        locked.settings.pop(IMPORTED, None)
        locked.save(update_fields=["settings"])
        job.shards.all().delete()
    run.settings = locked.settings
    drop_incomplete(run, alive)


# -- an import in shards: each stores its trajectories in a range of indices of its own, behind all final ones

PROVISIONAL = 2**30  # The first index of the ranges. A run of an import in shards holds fewer trajectories.


def drop_range(run: models.Run, first: int, stop: int, alive: Alive) -> None:
    """Remove the trajectories of a range of indices. The totals of the run are counted again when something goes."""
    dropped = False
    while True:
        with transaction.atomic():
            alive()
            trajectories = run.trajectories.filter(index__gte=first, index__lt=stop)
            keys = list(trajectories.order_by("index").values_list("pk", flat=True)[:200])
            if not keys:
                break
            delete_trajectories(keys)
            dropped = True
    if dropped:
        recount(run)


def move_range(run: models.Run, first: int, stop: int, to: int) -> int:
    """Give the trajectories of a range of indices the indices from ``to`` on, without holes. Returns how many. No
    trajectory may have one of the new indices. One statement."""
    table = connection.ops.quote_name(models.StoredTrajectory._meta.db_table)
    place = connection.ops.quote_name("index")
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {table} SET {place} = %s + ranked.n FROM ("
            f"SELECT id, row_number() OVER (ORDER BY {place}) - 1 AS n FROM {table} "
            f"WHERE run_id = %s AND {place} >= %s AND {place} < %s"
            f") AS ranked WHERE {table}.id = ranked.id",
            [to, run.pk, first, stop],
        )
        return cursor.rowcount


def next_final_index(run: models.Run) -> int:
    """The index behind the trajectories that have their final place."""
    last = last_index(run.trajectories.filter(index__lt=PROVISIONAL))
    return 0 if last is None else last + 1


def set_rejections(run: models.Run, rejected: Iterable[tuple[str, int | None, str]], n: int, alive: Alive) -> None:
    """Put the rejections of an import, each as file, line and reason, in place of those that are stored. ``n``: how
    many there are in all. As many as a run keeps are stored."""
    with transaction.atomic():
        alive()
        run.rejections.all().delete()
        models.Run.objects.filter(pk=run.pk).update(n_rejected=0)
        for file, line, reason in islice(rejected, MAX_REJECTIONS):
            add_rejections(run, file, [Rejected(line, reason)])
        models.Run.objects.filter(pk=run.pk).update(n_rejected=n)
    run.refresh_from_db(fields=["n_rejected"])


def beat_import(run: models.Run, job: models.Job) -> bool:
    """Write the progress of an import in shards. Returns True if somebody asked the run to stop."""
    read = job.shards.filter(reached__gt=0).aggregate(n=Sum("reached"))["n"] or 0
    return beat(run, bytes_done=read)


def end_import(run: models.Run, job: models.Job, status: str, error: str = "") -> None:
    """End an import and its job together. Raises :class:`JobLost`."""
    with transaction.atomic():
        if not end_job(job, status, error):
            raise JobLost
        run.status, run.error, run.finished_at = status, without_paths(error), timezone.now()
        run.save(update_fields=["status", "error", "finished_at"])
    take_figures(run)


def set_bytes_total(run: models.Run, n: int) -> None:
    """Remember how many bytes the files of an import have."""
    run.bytes_total = n
    run.save(update_fields=["bytes_total"])


def failed_import_of(run: models.Run) -> models.Job | None:
    """The last job that was to read files into a run and failed. One query."""
    return run.jobs.filter(kind="import", status=models.Job.Status.FAILED).order_by("-pk").first()


def names_at(run: models.Run, indices: Iterable[int]) -> list[tuple[int, int, str, str]]:
    """Key, index, external id and group of the trajectories at these indices. One query."""
    columns = ("pk", "index", "external_id", "group")
    return list(run.trajectories.filter(index__in=list(indices)).values_list(*columns))


def rename_trajectories(named: Sequence[tuple[str, str, int]]) -> None:
    """Give trajectories other names, each as external id, group and key."""
    change_whole(models.StoredTrajectory, ("external_id", "group"), named)


def never_sent_imports(before: datetime) -> QuerySet[models.Run]:
    """Older runs whose request was killed between keeping the files and sending them to a worker."""
    Run = models.Run
    waiting = Run.objects.filter(kind=Run.Kind.IMPORT, status=Run.Status.QUEUED, created_at__lt=before, jobs=None)
    return waiting.exclude(engine="recorder")
