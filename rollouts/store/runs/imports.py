"""What an import writes beside trajectories: its progress, rejected lines, its end, the removal of a file that is not
complete. Also the trajectories of files that are shown where they lie."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Max, QuerySet, Sum
from django.utils import timezone

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.formats import Rejected
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.store import models
from rollouts.store.bulk import change_whole
from rollouts.store.jobs.jobs import JobLost, end_job, is_active
from rollouts.store.runs.runs import beat, create_run, delete_trajectories, recount, start_run, take_figures
from rollouts.store.text import storable_text, without_paths
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.save_trajectories import bump_run, save_trajectories
from rollouts.store.trajectories.trajectories import LAST, last_index

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
    drop_range(run, done["next_index"], LAST, alive)
    with transaction.atomic():
        alive()
        run.rejections.filter(pk__gt=done["last_rejection"]).delete()
        models.Run.objects.filter(pk=run.pk).update(n_rejected=done["n_rejected"])
        run.refresh_from_db(fields=["n_trajectories", "n_rejected"])
        # A worker may have been lost before it could count.
        if run.n_trajectories != run.trajectories.count():
            recount(run)


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


OPENED = "opened"  # In the settings of a run: the files that its trajectories are read from.
_FIGURES = ("n_steps", "n_rows", "n_tokens", "n_sampled", "n_trained")


def opened_run(paths: Sequence[str], **fields: Any) -> models.Run:
    """The run of these files, made at the first call."""
    run = models.Run.objects.filter(settings__opened=list(paths)).first()
    if run is None:
        name = ", ".join(path.rpartition("/")[2] for path in paths)
        run = create_run(models.Run.Kind.IMPORT, name, settings={OPENED: list(paths)}, **fields)
    start_run(run)
    return run


def add_opened(run: models.Run, lines: Sequence[Any], formats: Sequence[str]) -> None:
    """Add trajectories to the list, with the figures of the index. Their steps and rows are not stored."""
    names = {"reward": "reward", "group": "prompt_group", "training_step": "training_step",
             "stop_reason": "stop_reason", "error": "error"}
    trajectories = [Trajectory(line["name"], **{name: line[key] for name, key in names.items()}) for line in lines]
    with transaction.atomic():
        models.Run.objects.filter(pk=run.pk).update(format=", ".join(formats)[:200])
        records = save_trajectories(run, trajectories)
        for record, line in zip(records, lines, strict=True):
            for name in _FIGURES:
                setattr(record, name, line[name])
        models.StoredTrajectory.objects.bulk_update(records, _FIGURES, batch_size=100)
        bump_run(run, {}, **{name: sum(line[name] for line in lines) for name in _FIGURES[:-1]})


def add_checked(run: models.Run, diagnoses: Mapping[str, tuple[Sequence[Finding], Mapping[str, Any]]]) -> None:
    """Add to the list what was found, and what each check came to, in trajectories by their id that nobody opened."""
    with transaction.atomic():
        records = list(run.trajectories.filter(external_id__in=list(diagnoses), checks__isnull=True))
        for record in records:
            record.checks = dict(diagnoses[record.external_id][1])
        replace_findings(run, [(record, diagnoses[record.external_id][0]) for record in records])


def is_filled(record: models.StoredTrajectory) -> bool:
    """Whether its steps and rows are stored, as of every run but one that was opened. There it is one query."""
    return OPENED not in record.run.settings or record.rows.exists()


def take_place(record: models.StoredTrajectory) -> None:
    """Make the record, which was removed, the trajectory that was stored in its place: it keeps the address."""
    models.StoredTrajectory.objects.filter(run=record.run_id, index=record.index).update(code=record.code)
    record.pk = models.StoredTrajectory.objects.get(code=record.code).pk
    record.refresh_from_db()
    recount(record.run)
