"""Runs jobs of every kind: one task does a job, and a worker takes over jobs that have lost theirs."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import shared_task, signals
from django.conf import settings
from django.db import connection

from rollout_inspector.refusal import Refusal, Remedy
from rollouts.jobs import alarm_delivery
from rollouts.jobs.broker import DO_JOB, queue_of, send_shards, send_task
from rollouts.jobs.storage import unused_files
from rollouts.store.jobs.job_queue import is_of_engine, must_yield, next_engine_job, take_engine_job, take_next_job
from rollouts.store.jobs.jobs import (
    TELL_SECONDS, Beat, JobLost, Sharing, adopt_jobs, end_job, kind_of, note_outage, return_job, touch_job,
    unfollowed_jobs, waiting_jobs
)
from rollouts.store.jobs.shards import (
    cut_job, end_shard, first_failed_shard, is_cut, open_shards, release_shard, retry_shard, tell_whole
)
from rollouts.store.models import Job
from rollouts.store.outages import is_outage, said_of
from rollouts.store.people.access import EVERYTHING
from rollouts.store.runs.policy_versions import COUNT_SECONDS, count_due
from rollouts.store.runs.runs import find_run
from rollouts.worker.heartbeat import Heartbeat, queues_of, repeat

log = logging.getLogger(__name__)

SWEEP_SECONDS = 600.0  # How often a worker removes files that nobody needs any more.
ADOPT_SECONDS = 5.0  # How often a worker looks for jobs that have lost their worker.
HEARTBEAT_SECONDS = 5.0  # How often a worker renews the heartbeat of its job.
MAX_ATTEMPTS = 5
"""A job may kill its workers. After so many lost workers, or so many outages, it fails; so does a shard that breaks off
so often."""


class _Yields(JobLost):
    """The worker of a shard goes back to the queue."""


@shared_task(name=DO_JOB)
def do_job(job_id: int) -> None:
    """Do a job, or continue a job whose worker is lost. A task that is delivered twice is done once. The task says that
    a job waits. Which job is done follows from what all users have under way."""
    if is_of_engine(job_id):
        # The message went to the queue of a model, whose workers do no other jobs.
        if (job := take_engine_job(job_id)) is not None:
            work_on(job)
            if (waiting := next_engine_job(job)) is not None:
                send_task(DO_JOB, waiting.pk, queue_of(waiting))
        return
    if (job := take_next_job(settings.JOBS_PER_USER, job_id)) is None:
        return
    work_on(job, share=True)
    # A job of this user may have waited for the end of this one: its task has found that it must.
    if waiting_jobs(EVERYTHING):
        send_task(DO_JOB, job_id)


def work_on(job: Job, tell: Callable[[Job], object] = lambda _: None, share: bool = False) -> None:
    """Does a job that was taken. ``tell`` is called with the job at each sign of progress. ``share``: a large job is
    only cut, and other workers are sent for its shards. An outage leaves the job as it is, without a heartbeat: a
    worker takes it up when it has been silent for a while."""
    try:
        _work_on(job, tell, share)
        follow = kind_of(job).follow
        if follow is not None and job.whole_id is None:
            run = find_run(jobs__pk=job.pk, jobs__status=Job.Status.DONE)
            if run is not None:
                follow(run, job.created_by)
    except Exception as error:
        if not is_outage(error):
            raise
        log.warning("job waits for an outage to end job=%s kind=%s", job.code, job.kind, exc_info=True)
        if not connection.in_atomic_block:
            connection.close()  # the next use opens another
        note_outage(job, said_of(error))


def _work_on(job: Job, tell: Callable[[Job], object], share: bool) -> None:
    kind = kind_of(job)
    try:
        if job.attempt > MAX_ATTEMPTS:
            raise Refusal(
                f"It was tried {MAX_ATTEMPTS} times. The last time it broke off: {job.error}" if job.error
                else f"{MAX_ATTEMPTS} workers were lost at it, so it is not tried again by itself."
            )
        with Heartbeat(f"job-{job.pk}", partial(touch_job, job), HEARTBEAT_SECONDS):
            if job.whole_id is not None:
                _do_shard(job, tell)
            elif (sharing := kind.sharing) is None or not _shared(job, sharing, Beat(job, tell), share):
                kind.handler(job, Beat(job, tell))
    except JobLost:
        if job.whole_id is None:
            # Nothing changes if another worker has the job, or is to have it because this one was silent.
            end_job(job, Job.Status.CANCELLED, held=(Job.Status.RUNNING,))
    except Refusal as refusal:
        _fail(job, str(refusal), refusal.remedy)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of native code is no Exception
        if is_outage(error):
            raise
        log.exception("job broke off job=%s kind=%s", job.code, job.kind)
        sentence = f"It broke off: {type(error).__name__}: {error}"[:2000]
        # A shard begins again by itself; what the others have read or will read stays.
        if job.whole_id is None or job.attempt >= MAX_ATTEMPTS or not retry_shard(job, sentence):
            _fail(job, sentence)


def _shared(job: Job, sharing: Sharing, beat: Beat, share: bool) -> bool:
    """Cut a large job, go on with one that was cut, or put its shards together. False = the job is done in one."""
    if not is_cut(job):
        if not share or not (parts := sharing.cut(job, beat)):
            return False
        cut_job(job, parts)
    if waiting := open_shards(job):
        send_shards(waiting)
        return True
    if (failed := first_failed_shard(job)) is not None:
        raise Refusal(failed.error, Remedy(failed.remedy) if failed.remedy else None)
    sharing.join(job, beat)
    return True


def _do_shard(shard: Job, tell: Callable[[Job], object]) -> None:
    told_at = time.monotonic()

    def go_on(job: Job) -> None:
        nonlocal told_at
        tell(job)
        if time.monotonic() - told_at >= TELL_SECONDS:
            told_at = time.monotonic()
            tell_whole(job)
            if must_yield(job, settings.JOBS_PER_USER):
                raise _Yields

    sharing = kind_of(shard).sharing
    assert sharing is not None
    try:
        columns = sharing.do(shard, Beat(shard, go_on))
    except _Yields:
        # Not before the handler has left: the next worker may be there at once, with the same number of the attempt.
        release_shard(shard)
        return
    _end_shard(shard, Job.Status.DONE, "", **columns)


def _end_shard(shard: Job, status: str, error: str, **fields: Any) -> None:
    """End a shard. A worker is sent where it was the last one, or where it failed."""
    if (whole := end_shard(shard, status, error, **fields)) is not None:
        send_task(DO_JOB, whole.pk)  # if the broker does not answer, the clock sends it


def _fail(job: Job, sentence: str, remedy: Remedy | None = None) -> None:
    if job.whole_id is not None:
        _end_shard(job, Job.Status.FAILED, sentence, remedy=remedy or "")
    else:
        kind_of(job).fail(job, sentence, remedy or "")


@signals.worker_ready.connect
def _adopt_in_background(sender: Any, **_: Any) -> None:
    """While a worker of the default queue lives, it sends again the jobs that have lost their worker, and sweeps."""
    if settings.CELERY_TASK_DEFAULT_QUEUE in queues_of(sender):
        repeat("adopt-jobs", ADOPT_SECONDS, _adopt)
        repeat("follow-jobs", SWEEP_SECONDS / 10, ask_for_followers)
        repeat("sweep", SWEEP_SECONDS, unused_files.sweep)
        repeat("figures", COUNT_SECONDS / 2, count_due)
        repeat("alarms", alarm_delivery.CLOCK_SECONDS, alarm_delivery.send_due)


def ask_for_followers() -> None:
    """Ask for what follows jobs whose worker was lost at their end. What was asked for already stays as it is."""
    for job in unfollowed_jobs():
        if (follow := kind_of(job).follow) is not None and job.run is not None:
            follow(job.run, job.created_by)


def _adopt() -> None:
    for job in adopt_jobs():
        log.warning("job taken over job=%s kind=%s", job.code, job.kind)
        if send_task(DO_JOB, job.pk, queue_of(job)):
            return_job(job)
