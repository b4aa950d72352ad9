"""Workers that do waiting jobs in any order, in the process of the test."""

from __future__ import annotations

import random

from rollouts.store.jobs.jobs import take_job
from rollouts.store.models import Job
from rollouts.worker import jobs


def waiting() -> list[int]:
    """The keys of the jobs that wait for a worker."""
    return list(Job.objects.filter(status=Job.Status.QUEUED).order_by("pk").values_list("pk", flat=True))


def do_all(order: random.Random) -> None:
    """Do what waits, and what waits because of that, in an order that nobody chose."""
    while keys := waiting():
        taken = take_job(order.choice(keys))
        assert taken is not None
        jobs.work_on(taken, share=True)
