"""Runs jobs of every kind: one task does a job, and a worker takes over jobs that have lost theirs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import shared_task, signals
from django.conf import settings
from django.db import connection

from rollouts.models import Job
from rollouts.selectors.jobs import waiting_jobs
from rollouts.services.job_queue import take_next_job
from rollouts.services.jobs import (
    Beat,
    JobFailed,
    JobLost,
    adopt_jobs,
    end_job,
    note_outage,
    return_job,
    touch_job,
)
from rollouts.services.outages import is_outage, said_of
from rollouts.tasks.heartbeat import Heartbeat, queues_of, repeat
from rollouts.work import diagnosis, exporting, imports, leftovers, replays, template_checks
from rollouts.work.sending import DO_JOB, send_task

log = logging.getLogger(__name__)

SWEEP_SECONDS = 600.0
"""How often a worker removes files that nobody needs any more."""
ADOPT_SECONDS = 5.0
"""How often a worker looks for jobs that have lost their worker."""
HEARTBEAT_SECONDS = 5.0
"""How often a worker renews the heartbeat of its job."""
MAX_ATTEMPTS = 5
"""A job may kill its workers. After so many lost workers, or so many outages, it fails."""

HANDLERS: dict[Job.Kind, Callable[[Job, Beat], None]] = {
    Job.Kind.DIAGNOSE: diagnosis.do_job,
    Job.Kind.EXPORT: exporting.do_job,
    Job.Kind.REPLAY: replays.do_run_job,
    Job.Kind.IMPORT: imports.do_job,
    Job.Kind.DIAGNOSE_PUSHED: diagnosis.do_pushed_job,
    Job.Kind.REPLAY_TRAJECTORY: replays.do_job,
    Job.Kind.CHECK_TEMPLATE: template_checks.do_job,
    Job.Kind.REPAIR_TEMPLATE: template_checks.do_job,
}
"""Kind of job -> its handler, which begins where an earlier worker stopped. A handler ends its job as done, if possible
in the transaction of its last result. It raises :class:`JobFailed` with a sentence, or :class:`JobLost`."""

FAILURES: dict[Job.Kind, Callable[[Job, str], None]] = {
    Job.Kind.IMPORT: imports.fail,
    Job.Kind.DIAGNOSE_PUSHED: diagnosis.fail_pushed_job,
}
"""Kind of job -> what ends one that could not be done with a sentence, where more than the job ends."""


@shared_task(name=DO_JOB)
def do_job(job_id: int) -> None:
    """Do a job, or continue a job whose worker is lost. A task that is delivered twice is done once.

    The task says that a job waits. Which job is done follows from what all users have under way.
    """
    if (job := take_next_job(settings.JOBS_PER_USER, job_id)) is None:
        return
    work_on(job)
    # A job of this user may have waited for the end of this one: its task has found that it must.
    if waiting_jobs():
        send_task(DO_JOB, job_id)


def work_on(job: Job, tell: Callable[[Job], object] = lambda _: None) -> None:
    """Does a job that was taken. ``tell`` is called with the job at each sign of progress.

    An outage leaves the job as it is, without a heartbeat: a worker takes it up when it has been silent for a while.
    """
    try:
        _work_on(job, tell)
    except Exception as error:
        if not is_outage(error):
            raise
        log.warning("job waits for an outage to end job=%s kind=%s", job.code, job.kind, exc_info=True)
        if not connection.in_atomic_block:
            connection.close()  # the next use opens another
        note_outage(job, said_of(error))


def _work_on(job: Job, tell: Callable[[Job], object]) -> None:
    try:
        if job.attempt > MAX_ATTEMPTS:
            raise JobFailed(_too_many_attempts(job))
        with Heartbeat(f"job-{job.pk}", partial(touch_job, job), HEARTBEAT_SECONDS):
            HANDLERS[Job.Kind(job.kind)](job, Beat(job, tell))
    except JobLost:
        end_job(job, Job.Status.CANCELLED)  # changes nothing if another worker has the job
    except JobFailed as failure:
        _fail(job, str(failure))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of native code is no Exception
        if is_outage(error):
            raise
        log.exception("job broke off job=%s kind=%s", job.code, job.kind)
        _fail(job, f"It broke off: {type(error).__name__}: {error}"[:2000])


def _too_many_attempts(job: Job) -> str:
    if job.error:
        return f"It was tried {MAX_ATTEMPTS} times. The last time it broke off: {job.error}"
    return f"{MAX_ATTEMPTS} workers were lost at it, so it is not tried again by itself."


def _fail(job: Job, sentence: str) -> None:
    if job.kind in FAILURES:
        FAILURES[Job.Kind(job.kind)](job, sentence)
    else:
        end_job(job, Job.Status.FAILED, sentence)


@signals.worker_ready.connect
def _adopt_in_background(sender: Any, **_: Any) -> None:
    """While a worker of the default queue lives, it sends again the jobs that have lost their worker, and sweeps."""
    if settings.CELERY_TASK_DEFAULT_QUEUE in queues_of(sender):
        repeat("adopt-jobs", ADOPT_SECONDS, _adopt)
        repeat("sweep", SWEEP_SECONDS, leftovers.sweep)


def _adopt() -> None:
    for job in adopt_jobs():
        log.warning("job taken over job=%s kind=%s", job.code, job.kind)
        if send_task(DO_JOB, job.pk):
            return_job(job)
