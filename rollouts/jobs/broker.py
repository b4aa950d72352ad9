"""Sends tasks to workers through the broker, and says in a sentence why it does not take them."""

import logging
from collections.abc import Iterable

import redis
from celery import current_app

from rollouts.store.database import reload
from rollouts.store.jobs.jobs import end_job, kind_of
from rollouts.store.models import Job

log = logging.getLogger(__name__)

DO_JOB = "rollouts.do_job"
RUN_ROLLOUTS = "rollouts.run_rollouts"
REDIS_FULL = "Redis has no memory left: it answers, and takes nothing new. Raise its maxmemory, or remove foreign keys."


def engine_queue(model: str) -> str:
    """The queue of the workers that serve a model."""
    return f"engine.{model}"


def queue_of(job: Job) -> str | None:
    """The queue of the workers that do a job; None = the default one."""
    return engine_queue(job.options["model"]) if kind_of(job).of_engine else None


def redis_fault(error: BaseException) -> str:
    """Why Redis, or the broker in front of it, refused a write: one sentence with the way out."""
    if "maxmemory" in str(error):  # of kombu, whose errors are no errors of redis, the text alone says it
        return REDIS_FULL
    if isinstance(error, redis.ResponseError):
        return f"Redis refuses a write: {str(error)[:200]}."
    return f"Redis does not answer ({type(error).__name__}). Start it (make run starts one), or look at REDIS_URL."


def send_task(name: str, key: int, queue: str | None = None) -> str:
    """Send a task with the key of a database row. Returns a sentence if the broker does not take it; else empty."""
    try:
        current_app.send_task(name, (key,), queue=queue)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        sentence = redis_fault(error)
        log.warning("task %s of %s cannot be sent: %s", name, key, sentence)
        return f"No worker can be sent. {sentence} Then try again."
    return ""


def send_shards(keys: Iterable[int]) -> None:
    """Send a message for each shard; each brings one worker. The clock sends what the broker does not take."""
    for key in keys:
        if send_task(DO_JOB, key):
            break


def send_job(job: Job) -> str:
    """Send a job. If the broker does not take it, the job fails with a sentence, which is returned."""
    if sentence := send_task(DO_JOB, job.pk, queue_of(job)):
        end_job(job, Job.Status.FAILED, sentence)
        reload(job)
    return sentence
