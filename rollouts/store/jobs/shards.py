"""Shards: the parts of a large job. A shard is a job of its own, so it is taken, kept alive and tried again like one.
The whole job has no worker while its shards are under way. The worker that ends the last shard queues the whole job
again, and the worker that takes it then puts the results together."""

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import F, Sum
from django.utils import timezone

from rollouts.store.jobs.jobs import beat_job, close_shards, end_job
from rollouts.store.models import ACTIVE, Job
from rollouts.store.text import without_paths


def cut_job(job: Job, parts: Sequence[Mapping[str, Any]], **fields: Any) -> list[Job]:
    """Cut a job that is held into shards, one for the options of each part. ``fields`` are columns of every shard. The
    option ``first`` says where a part begins. Returns the shards in order. Raises :class:`JobLost`."""
    with transaction.atomic():
        beat_job(job, progress=_progress(0, len(parts)))
        shards = [
            Job(whole=job, kind=job.kind, options=dict(part), created_by_id=job.created_by_id, **fields)
            for part in parts
        ]
        return Job.objects.bulk_create(shards)


def is_cut(job: Job) -> bool:
    """Whether a job has shards."""
    return job.shards.exists()


def open_shards(job: Job) -> list[int]:
    """The keys of the shards of a job that have not ended, in the order in which they were made."""
    return list(job.shards.filter(status__in=ACTIVE).order_by("pk").values_list("pk", flat=True))


def shards_of(job: Job) -> list[Job]:
    """All shards of a job, in the order of what they cover: the option ``first`` of each says where it begins."""
    return sorted(job.shards.all(), key=lambda shard: int(shard.options["first"]))


def tell_whole(shard: Job) -> None:
    """Write the sum of what the shards have done, as the progress of the whole job."""
    assert shard.whole_id is not None
    n_done = Job.objects.filter(whole=shard.whole_id).aggregate(n=Sum("n_done"))["n"] or 0
    Job.objects.filter(pk=shard.whole_id, status=Job.Status.RUNNING).update(n_done=n_done, heartbeat_at=timezone.now())


def end_shard(shard: Job, status: str, error: str = "", **fields: Any) -> Job | None:
    """End a shard. Returns the whole job if a worker is to put it together now, or to end it because a shard failed.
    Nothing changes if the shard has ended or another worker holds it. Only one caller gets the whole job."""
    assert shard.whole_id is not None
    with transaction.atomic():
        whole = Job.objects.select_for_update(no_key=True).filter(pk=shard.whole_id).first()
        if whole is None or not end_job(shard, status, error, **fields):
            return None
        n_open, n = whole.shards.filter(status__in=ACTIVE).count(), whole.shards.count()
        if status == Job.Status.DONE and n_open:
            Job.objects.filter(pk=whole.pk).update(progress=_progress(n - n_open, n))
            tell_whole(shard)
            return None
        return _queued(whole)


def hand_on_shards(old: Job, new: Job) -> None:
    """Let a job go on with the shards of one that failed: what is done stays, and what is left waits again. Then the
    new job has no worker while they are under way, as after :func:`cut_job`."""
    with transaction.atomic():
        unfinished = list(old.shards.exclude(status=Job.Status.DONE))
        # New rows, because a lost worker of an old one may still live.
        old.shards.filter(pk__in=[shard.pk for shard in unfinished]).delete()
        old.shards.update(whole=new)
        Job.objects.bulk_create(
            Job(whole=new, kind=new.kind, options=shard.options, created_by_id=new.created_by_id)
            for shard in unfinished
        )
        if unfinished:
            new.status, new.heartbeat_at = Job.Status.RUNNING, timezone.now()
            new.save(update_fields=["status", "heartbeat_at"])


def stop_shards(job: Job) -> Job | None:
    """End the shards of a job that have not ended. Returns the job, queued for the worker that ends it. None if no
    shard was open."""
    with transaction.atomic():
        whole = Job.objects.select_for_update(no_key=True).filter(pk=job.pk, status=Job.Status.RUNNING).first()
        if whole is None or not whole.shards.filter(status__in=ACTIVE).exists():
            return None
        return _queued(whole)


def _queued(whole: Job) -> Job:
    close_shards(whole)
    whole.status, whole.heartbeat_at, whole.progress = Job.Status.QUEUED, timezone.now(), ""
    whole.save(update_fields=["status", "heartbeat_at", "progress"])
    return whole


def release_shard(shard: Job) -> bool:
    """Put a shard that is held back into the queue; the try does not count. False if another worker holds it. The
    caller stores nothing of the shard afterwards."""
    return _released(shard, attempt=F("attempt") - 1)


def retry_shard(shard: Job, error: str) -> bool:
    """The same for a shard that broke off: the try counts, and the others go on meanwhile."""
    return _released(shard, error=without_paths(error))


def _released(shard: Job, **fields: Any) -> bool:
    ours = Job.objects.filter(pk=shard.pk, attempt=shard.attempt, status=Job.Status.RUNNING)
    return bool(ours.update(status=Job.Status.QUEUED, heartbeat_at=timezone.now(), **fields))


def _progress(n_done: int, n: int) -> str:
    return f"{n_done:,} of {n:,} parts"


def unfinished_shards(job: Job) -> list[Job]:
    """The shards of a job that are not done, whether or not they have ended. One query."""
    return list(job.shards.exclude(status=Job.Status.DONE))


def first_failed_shard(job: Job) -> Job | None:
    """The first shard of a job that failed. One query."""
    return job.shards.filter(status=Job.Status.FAILED).order_by("pk").first()
