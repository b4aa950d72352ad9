"""Work whose process dies."""

import os
import signal
from collections.abc import Callable
from typing import Any

from django.db import connections

from rollouts.jobs.imports import imports
from rollouts.store.jobs import jobs as job_services
from rollouts.store.models import Job


def die_after(n: int, work: Callable[[], object]) -> None:
    """Do some work in another process, which is killed after its nth sign of life."""
    connections.close_all()  # two processes must not share one
    pid = os.fork()
    if pid == 0:
        real, seen = job_services.beat_job, 0

        def beat_and_die(job: Job, **fields: Any) -> None:
            nonlocal seen
            real(job, **fields)
            seen += 1
            if seen == n:
                os.kill(os.getpid(), signal.SIGKILL)

        job_services.beat_job = beat_and_die
        job_services.TELL_SECONDS = -1.0
        imports.BEAT_SECONDS = -1.0
        try:
            work()
        finally:
            os._exit(7)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
