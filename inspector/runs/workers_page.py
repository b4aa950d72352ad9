"""Workers: the queues that they serve, their load, and the tasks that wait."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import redis
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from inspector.server.health import redis_problem, served_queues
from inspector.server.machines import differences, list_machines
from inspector.server.workers import WorkerState, connect, list_workers, queue_lengths
from inspector.web.access import access
from inspector.web.twins import Page, page
from rollouts.jobs.broker import redis_fault
from rollouts.store.jobs.jobs import waiting_jobs
from rollouts.store.runs.runs import unfinished_launches

MAX_UNFINISHED = 50
RUN_COLUMNS = ("code", "name", "status", "model", "n_finished", "n_expected", "heartbeat_at")


@dataclass(frozen=True)
class WorkersPage(Page):
    """The workers, the queues that they serve, and the work that waits."""

    problem: str
    """Why the workers are not known; empty while Redis answers."""
    differences: list[str]
    """What differs between machines and does harm: sentences."""
    workers: list[dict[str, Any]]
    """Every worker seen in the last hour."""
    queues: list[dict[str, Any]]
    """Every queue that is or should be served."""
    waiting: dict[str, int]
    """Kind of job -> jobs of the user's projects that wait for a worker of the queue ``default``."""
    runs: list[dict[str, Any]]
    """Launched runs of the user's projects that are not finished, the oldest first."""


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """Every worker seen in the last hour, every queue, and the runs that are not finished. Workers and queues are those
    of the server: all who log in see how busy it is. Runs and jobs are of their projects."""
    problem, workers, lengths, differing = "", [], {}, []
    try:
        connection = connect()
        workers = list_workers(connection)
        differing = [sentence for sentence, is_harmful in differences(list_machines(connection)) if is_harmful]
        names = sorted({*served_queues(), *(queue for worker in workers for queue in worker.queues)})
        lengths = queue_lengths(connection, names)
        problem = redis_problem()
    except redis.RedisError as error:
        problem = redis_fault(error)
    if problem:
        problem += " Until then nobody knows who works."
    launches = unfinished_launches(access(request), MAX_UNFINISHED)
    data = WorkersPage(
        problem, differences=differing, workers=[_worker(worker) for worker in workers],
        queues=[_queue(name, waiting, workers) for name, waiting in lengths.items()],
        waiting=waiting_jobs(access(request)),
        runs=[{name: getattr(run, name) for name in RUN_COLUMNS} for run in launches],
    )
    return page(request, "workers/index.html", data)


def _worker(worker: WorkerState) -> dict[str, Any]:
    return asdict(worker) | {
        "doing": [name.rpartition(".")[2].replace("_", " ") for name in worker.active],
        "alive": worker.is_alive,
        "started_at": datetime.fromtimestamp(worker.started_at, UTC),
        "seen_at": datetime.fromtimestamp(worker.seen_at, UTC),
    }


def _queue(name: str, waiting: int, workers: list[WorkerState]) -> dict[str, Any]:
    serving = [worker for worker in workers if worker.is_alive and name in worker.queues]
    return {
        "name": name,
        "waiting": waiting,
        "workers": [worker.name for worker in serving],
        "active": sum(len(worker.active) for worker in serving),
        "slots": sum(worker.slots for worker in serving),
    }
