"""Sends tasks to workers through the broker. One sentence says that the broker does not answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from celery import current_app

from rollouts.store.database import reload
from rollouts.store.jobs.jobs import end_job, kind_of
from rollouts.store.models import Job

log = logging.getLogger(__name__)

DO_JOB = "rollouts.do_job"
RUN_ROLLOUTS = "rollouts.run_rollouts"
NO_BROKER = "Redis does not answer, so no worker can be sent. Start it (make run starts one), then try again."


def engine_queue(model: str) -> str:
    """The queue of the workers that serve a model."""
    return f"engine.{model}"


def queue_of(job: Job) -> str | None:
    """The queue of the workers that do a job; None = the default one."""
    return engine_queue(job.options["model"]) if kind_of(job).of_engine else None


def send_task(name: str, key: int, queue: str | None = None) -> str:
    """Send a task with the key of a database row. Returns a sentence if the broker does not answer; else empty."""
    try:
        current_app.send_task(name, (key,), queue=queue)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        log.warning("task %s of %s cannot be sent: %s", name, key, type(error).__name__)
        return NO_BROKER
    return ""


def send_shards(keys: Iterable[int]) -> None:
    """Send a message for each shard; each brings one worker. The clock sends what the broker does not take."""
    for key in keys:
        if send_task(DO_JOB, key):
            break


def send_job(job: Job) -> str:
    """Send a job. If the broker does not answer, the job fails with a sentence, which is returned."""
    if sentence := send_task(DO_JOB, job.pk, queue_of(job)):
        end_job(job, Job.Status.FAILED, sentence)
        reload(job)
    return sentence
