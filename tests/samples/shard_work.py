"""Workers that do waiting jobs in any order, in the process of the test."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollouts.store.jobs.jobs import JOB_KINDS, take_job
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


def change_kind(patch: pytest.MonkeyPatch, slug: str, **fields: Any) -> None:
    """Give the record of a kind of job other fields while a test runs."""
    patch.setitem(JOB_KINDS, slug, replace(JOB_KINDS[slug], **fields))


def share_by(patch: pytest.MonkeyPatch, slug: str, do: Callable[..., Any]) -> None:
    """Do the shards of a kind in another way while a test runs."""
    sharing = JOB_KINDS[slug].sharing
    assert sharing is not None
    change_kind(patch, slug, sharing=sharing._replace(do=do))
