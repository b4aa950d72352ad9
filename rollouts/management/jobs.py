"""Doing jobs and launched runs in the process of a command, or waiting for the workers of these runs."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from celery import current_app
from django.core.management.base import CommandError
from django.db import transaction
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from rollout_inspector.commands.remedies import WORDS
from rollout_inspector.outputs import show_progress
from rollout_inspector.refusal import worded
from rollouts.jobs import launch
from rollouts.jobs.broker import send_job
from rollouts.store.database import reload
from rollouts.store.jobs.jobs import end_job, is_active, take_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import ask_to_stop
from rollouts.worker.jobs import work_on


@contextmanager
def run_jobs(tell: Callable[[Job], object] = lambda _: None, cancels: bool = False) -> Iterator[list[Job]]:
    """Jobs that the block asks for and appends are done where it ends, and are then as the database has them. ``tell``
    is called with a job at each sign of progress. ``cancels``: Ctrl-C cancels the job, and is no error."""
    jobs: list[Job] = []
    with transaction.atomic():  # no worker sees a job before it is taken here
        yield jobs
        jobs[:] = filter(None, [take_job(job.pk) for job in jobs])
    for job in jobs:
        try:
            work_on(job, tell)
        except KeyboardInterrupt:
            if not cancels:
                raise
            end_job(job, Job.Status.CANCELLED)
        reload(job)


def run_or_send(run: Run, ask: Callable[[], tuple[Job, bool]], verb: str, background: bool) -> Job:
    """The job of a run, done here with its progress on a terminal, or sent to a worker in the ``background``. ``ask``:
    the job, and whether it is new. ``verb``: what is done to the run, such as `diagnosed`. Ctrl-C cancels it. Raises
    :class:`CommandError` when the job is under way already, when it fails, or when no worker can be sent for it."""

    def tell(job: Job) -> None:
        end = "\n" if job.n_done and job.n_done == job.n_total else ""
        show_progress(f"{job.n_done:,} of {job.n_total:,} trajectories", end)

    with run_jobs(tell if sys.stderr.isatty() else lambda _: None, cancels=True) as jobs:
        job, is_new = ask()
        jobs += [job] if is_new and not background else []
    reload(job)
    if not is_new:
        raise CommandError(
            f"Run {run.code} is being {verb} already: {job.n_done:,} of {job.n_total:,} trajectories are done. "
            "Wait for it, or cancel it on the run's page."
        )
    if background and (sentence := send_job(job)):
        raise CommandError(sentence)
    if not background and job.status != Job.Status.DONE:
        what = worded(job.error, job.remedy, WORDS) or f"It was {job.status}."
        raise CommandError(f"{what} {job.n_done:,} of {job.n_total:,} trajectories are {verb}.")
    return job


POLL_SECONDS = 0.25
ANSWER_SECONDS = 1.0


def is_served(model: str) -> bool:
    """Whether a worker on this data folder's broker answers that it takes the model's runs. Waits up to a second."""
    served = launch.served_models().get(model)
    if served is None:
        return False
    try:
        answers = current_app.control.inspect(timeout=ANSWER_SECONDS).active_queues() or {}
    except (OSError, OperationalError, RedisError):
        return False
    return any(queue["name"] == served.queue for queues in answers.values() for queue in queues)


def works_here(model: str, waits: bool) -> bool:
    """Whether a command that waits makes the rollouts itself: no broker is named, and no worker answers."""
    return waits and not os.environ.get("REDIS_URL") and not is_served(model)


def finish_runs(runs: Sequence[Run], here: bool, tell: Callable[[str], object]) -> None:
    """Return when the runs have ended, and are as the database has them. ``here``: do their work in this process."""
    if here:
        tell(f"No worker serves {runs[0].model} now, so the rollouts are made in this process.")
        _work_here(runs)
    try:
        for run in runs:
            reload(run)
            while is_active(run):
                time.sleep(POLL_SECONDS)
                reload(run)
    except KeyboardInterrupt:
        for run in runs:
            tell(f"The run {run.code} goes on. The run's page shows it.")
        raise


def _work_here(runs: Sequence[Run]) -> None:
    from rollouts.worker import run_rollouts

    try:
        for run in runs:
            run_rollouts.work_on(run.pk)
    except KeyboardInterrupt:
        for run in runs:
            ask_to_stop(run)
            run_rollouts.settle(run.pk)
        raise
    finally:
        run_rollouts.close_engines()
