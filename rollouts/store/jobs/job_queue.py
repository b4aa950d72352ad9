"""Which of the waiting jobs a free worker does: no user waits for the jobs of another one."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from django.contrib.auth import get_user_model
from django.db import transaction
from django.db.models import QuerySet

from rollouts.store.jobs.jobs import engine_kinds, is_silent, kind_of, take_job
from rollouts.store.models import ACTIVE, Job


def take_next_job(limit: int, preferred: int = 0) -> Job | None:
    """The job for a worker that is free; None when no waiting job may begin now.

    Its user has the fewest jobs under way: in all, and then of its kind. Among equal ones it is the job whose key is
    ``preferred``, or else the oldest. A user with ``limit`` jobs under way waits until one of them ends.

    A shard counts as a job under way. But all shards of one job count once for the limit, so a large job takes every
    worker that nobody else needs; :func:`must_yield` returns these workers.
    """
    while (fair := _Queue.now().fairest(limit, preferred)) is not None:
        with transaction.atomic():
            # Of two free workers, the second one counts after the first one has taken its job.
            if fair.created_by_id is not None:
                get_user_model().objects.select_for_update(no_key=True).filter(pk=fair.created_by_id).first()
            queue = _Queue.now(created_by=fair.created_by_id)
            if queue.may_begin(fair, limit) and (job := take_job(fair.pk)) is not None:
                return job
    return None


def take_engine_job(pk: int) -> Job | None:
    """A job of an engine for the worker that takes it now; None when it has to wait, or another worker has it. A user
    has one such job under way for each model, so that scoring many runs leaves places to launched ones."""
    job = Job.objects.filter(pk=pk, kind__in=engine_kinds()).first()
    if job is None:
        return None
    with transaction.atomic():
        if job.created_by_id is not None:
            get_user_model().objects.select_for_update(no_key=True).filter(pk=job.created_by_id).first()
        under_way = _of_engine(job).filter(status=Job.Status.RUNNING, created_by=job.created_by_id).exclude(pk=pk)
        return None if any(not is_silent(other) for other in under_way) else take_job(pk)


def next_engine_job(ended: Job) -> Job | None:
    """The job that has waited longest for the model of a job that ended."""
    return _of_engine(ended).filter(status=Job.Status.QUEUED).order_by("pk").first()


def _of_engine(job: Job) -> QuerySet[Job]:
    return Job.objects.filter(kind__in=engine_kinds(), options__model=job.options.get("model"))


def must_yield(shard: Job, limit: int) -> bool:
    """Whether the worker of a shard is to go back to the queue, because a job waits that comes first.

    The user of the shard keeps ``limit`` workers in any case. A job that comes first belongs to a user with fewer jobs
    under way, or is another kind of work of the same user. Of all shards of the user only the newest yields, so that
    not every worker leaves what it has begun for one job.
    """
    queue = _Queue.now()
    n, owner = queue.n_of_user, shard.created_by_id
    if n[owner] <= limit or shard.pk != queue.newest_shard.get(owner):
        return False
    return any(
        n[job.created_by_id] < n[owner] - 1
        if job.created_by_id != owner
        else job.whole_id is None and not queue.n_of_kind[owner, job.kind]
        for job in queue.waiting
        if queue.may_begin(job, limit)
    )


@dataclass
class _Queue:
    """The jobs that have not ended. A job whose shards are under way is neither waiting nor under way itself."""

    waiting: list[Job] = field(default_factory=list)
    n_of_user: Counter[int | None] = field(default_factory=Counter)  # Owner -> jobs and shards under way.
    n_of_kind: Counter[tuple[int | None, str]] = field(default_factory=Counter)
    """(owner, kind) -> the same of one kind."""
    under_way: dict[int | None, set[int]] = field(default_factory=dict)
    """Owner -> keys of the jobs under way; a shard counts as its whole job."""
    newest_shard: dict[int | None, int] = field(default_factory=dict)
    """Owner -> the largest key of the shards under way."""

    @classmethod
    def now(cls, **of: Any) -> Self:
        """The queue as it is; ``of``: columns that choose jobs. One query."""
        queue = cls()
        columns_read = ("created_by", "kind", "status", "heartbeat_at", "whole")
        jobs = list(Job.objects.filter(status__in=ACTIVE, **of).only(*columns_read))
        cut = {job.whole_id for job in jobs}
        for job in jobs:
            if job.pk in cut:
                continue
            if job.status == Job.Status.QUEUED or is_silent(job):
                if not kind_of(job).of_engine:
                    queue.waiting.append(job)
                continue
            queue.n_of_user[job.created_by_id] += 1
            queue.n_of_kind[job.created_by_id, job.kind] += 1
            queue.under_way.setdefault(job.created_by_id, set()).add(job.whole_id or job.pk)
            if job.whole_id is not None:
                queue.newest_shard[job.created_by_id] = max(job.pk, queue.newest_shard.get(job.created_by_id, 0))
        return queue

    def may_begin(self, job: Job, limit: int) -> bool:
        """Whether a waiting job keeps the limit of its user."""
        under_way = self.under_way.get(job.created_by_id, set())
        return len(under_way) < limit or job.whole_id in under_way

    def fairest(self, limit: int, preferred: int) -> Job | None:
        """The waiting job that begins next; None = none may begin."""

        def place(job: Job) -> tuple[int, int, bool, int]:
            owner = job.created_by_id
            return self.n_of_user[owner], self.n_of_kind[owner, job.kind], job.pk != preferred, job.pk

        return min((job for job in self.waiting if self.may_begin(job, limit)), key=place, default=None)


def is_of_engine(pk: int) -> bool:
    """Whether a job is one that only workers of a model do. One query."""
    return Job.objects.filter(pk=pk, kind__in=engine_kinds()).exists()
