"""Workers: who serves which queue, how loaded they are, and what waits."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import redis
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from inspector.server.health import served_queues
from inspector.server.workers import WorkerState, connect, list_workers, queue_lengths
from inspector.web.twins import page
from rollouts.selectors.runs import unfinished_launches

MAX_QUEUED = 50


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    """Every worker seen in the last hour, every queue, and the runs that are not finished."""
    problem, workers, lengths = "", [], {}
    try:
        connection = connect()
        workers = list_workers(connection)
        names = sorted({*served_queues(), *(queue for worker in workers for queue in worker.queues)})
        lengths = queue_lengths(connection, names)
    except redis.RedisError as error:
        problem = f"Redis does not answer ({type(error).__name__}), so nobody knows who works. Look at REDIS_URL."
    data = {
        "problem": problem,
        "workers": [_worker(worker) for worker in workers],
        "queues": [_queue(name, waiting, workers) for name, waiting in lengths.items()],
        "runs": [
            {
                "code": run.code,
                "name": run.name,
                "status": run.status,
                "model": run.model,
                "n_finished": run.n_finished,
                "n_expected": run.n_expected,
                "heartbeat_at": run.heartbeat_at,
            }
            for run in unfinished_launches(MAX_QUEUED)
        ],
    }
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
