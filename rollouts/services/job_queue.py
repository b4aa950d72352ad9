"""Which of the waiting jobs a free worker does: no user waits for the jobs of another one."""

from __future__ import annotations

from collections import Counter

from django.contrib.auth import get_user_model
from django.db import transaction

from rollouts.models import ACTIVE, Job
from rollouts.selectors.activity import is_silent
from rollouts.services.jobs import take_job


def take_next_job(limit: int, preferred: int = 0) -> Job | None:
    """The job for a worker that is free; None when no waiting job may begin now.

    Its user has the fewest jobs under way: in all, and then of its kind. Among equal ones it is the job whose key is
    ``preferred``, or else the oldest. A user with ``limit`` jobs under way waits until one of them ends.
    """
    while (fair := _fairest_job(limit, preferred)) is not None:
        with transaction.atomic():
            # Of two free workers, the second one counts after the first one has taken its job.
            if fair.created_by_id is not None:
                get_user_model().objects.select_for_update(no_key=True).filter(pk=fair.created_by_id).first()
            of_user = Job.objects.filter(created_by=fair.created_by_id, status=Job.Status.RUNNING)
            is_free = sum(not is_silent(job) for job in of_user) < limit
            if is_free and (taken := take_job(fair.pk)) is not None:
                return taken
    return None


def _fairest_job(limit: int, preferred: int) -> Job | None:
    waiting: list[Job] = []
    under_way: list[Job] = []
    for job in Job.objects.filter(status__in=ACTIVE).only("created_by", "kind", "status", "heartbeat_at"):
        (waiting if job.status == Job.Status.QUEUED or is_silent(job) else under_way).append(job)
    n = Counter(job.created_by_id for job in under_way)
    n_of_kind = Counter((job.created_by_id, job.kind) for job in under_way)

    def place(job: Job) -> tuple[int, int, bool, int]:
        owner = job.created_by_id
        return n[owner], n_of_kind[owner, job.kind], job.pk != preferred, job.pk

    return min((job for job in waiting if n[job.created_by_id] < limit), key=place, default=None)
