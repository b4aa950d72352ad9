"""Doing jobs in the process of a command. Neither Redis nor a worker is needed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.core.management.base import CommandError
from django.db import transaction

from rollout_inspector.outputs import show_progress
from rollouts.jobs.broker import send_job
from rollouts.store.database import reload
from rollouts.store.jobs.jobs import end_job, take_job
from rollouts.store.models import Job, Run
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
    :class:`CommandError` when the job is under way already, or when no worker can be sent for it."""

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
    return job
