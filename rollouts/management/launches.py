"""Launched runs in the process of a command: waiting for their workers, or doing the work where there is none."""

import os
import time
from collections.abc import Callable, Sequence

from celery import current_app
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from rollouts.jobs import launch
from rollouts.store.database import reload
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import Run
from rollouts.store.runs.runs import ask_to_stop

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
