"""Workers: who serves which queue, how loaded they are, and what waits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime

import redis
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from inspector.server.health import served_queues
from inspector.server.workers import EngineState, WorkerState, connect, list_workers, queue_lengths
from inspector.web.twins import Page, fields_of, page
from rollouts.models import Run
from rollouts.selectors.runs import unfinished_launches

MAX_UNFINISHED = 50


@dataclass(frozen=True)
class WorkerLine:
    """A worker as it last described itself."""

    name: str
    queues: list[str]
    pid: int
    slots: int
    """Tasks that it can do at once."""
    active: list[str]
    """Names of the tasks under way."""
    started_at: datetime
    seen_at: datetime
    """Its last heartbeat."""
    engines: list[EngineState]
    """What it keeps warm."""
    doing: list[str]
    """The tasks under way, in words."""
    alive: bool
    """Its last heartbeat is recent."""

    @classmethod
    def of(cls, worker: WorkerState) -> WorkerLine:
        """Unix times become moments."""
        moments = {name: datetime.fromtimestamp(getattr(worker, name), UTC) for name in ("started_at", "seen_at")}
        doing = [name.rpartition(".")[2].replace("_", " ") for name in worker.active]
        return cls(**{**fields_of(worker), **moments}, doing=doing, alive=worker.is_alive)


@dataclass(frozen=True)
class QueueLine:
    """A queue, and the load of the workers that serve it."""

    name: str
    waiting: int
    """Tasks that no worker has taken."""
    workers: list[str]
    """Names of live workers that serve it."""
    active: int
    """Tasks under way at these workers, of other queues too."""
    slots: int
    """Tasks that these workers can do at once."""

    @classmethod
    def of(cls, name: str, waiting: int, workers: list[WorkerState]) -> QueueLine:
        """``workers`` are all that are known."""
        serving = [worker for worker in workers if worker.is_alive and name in worker.queues]
        return cls(
            name,
            waiting,
            workers=[worker.name for worker in serving],
            active=sum(len(worker.active) for worker in serving),
            slots=sum(worker.slots for worker in serving),
        )


@dataclass(frozen=True)
class UnfinishedRun:
    """A launched run that waits or works."""

    code: str
    name: str
    status: str
    model: str
    n_finished: int
    n_expected: int
    heartbeat_at: datetime | None

    @classmethod
    def of(cls, run: Run) -> UnfinishedRun:
        """The columns of the same names."""
        return cls(**{field.name: getattr(run, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class WorkersPage(Page):
    """Who serves which queue, how loaded, and what waits."""

    problem: str
    """Why nobody knows; empty while Redis answers."""
    workers: list[WorkerLine]
    """Every worker seen in the last hour."""
    queues: list[QueueLine]
    """Every queue that is or should be served."""
    runs: list[UnfinishedRun]
    """Launched runs that are not finished, the oldest first."""


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
    shown = WorkersPage(
        problem,
        workers=[WorkerLine.of(worker) for worker in workers],
        queues=[QueueLine.of(name, waiting, workers) for name, waiting in lengths.items()],
        runs=[UnfinishedRun.of(run) for run in unfinished_launches(MAX_UNFINISHED)],
    )
    return page(request, "workers/index.html", shown)
