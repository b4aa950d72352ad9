"""The state of the system for Prometheus: work that waits, engines, what is stored. It is read when somebody asks."""

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import redis
from django.conf import settings
from django.db import Error
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from inspector.server import workers
from inspector.server.health import served_queues
from inspector.server.page_cache import keep, recall
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.jobs.broker import DO_JOB, RUN_ROLLOUTS
from rollouts.store.jobs.jobs import JOB_KINDS
from rollouts.store.jobs.workload import Stored, Workload, stored, workload

log = logging.getLogger(__name__)

STORED_SECONDS = 60  # How long the figures that read every run are kept.
TASKS = (DO_JOB, RUN_ROLLOUTS)
OTHER = "other"  # The label of everything whose name comes from the data or from another program.


class StateCollector(Collector):
    """Reads the database and Redis once. What does not answer is missing, and ``inspector_up`` says so."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = {"database": 1, "redis": 1}
        try:
            yield from _work(workload())
            yield from _stored(_kept_figures())
        except Error as error:
            up["database"] = 0
            log.warning("no metrics of the database: %s", type(error).__name__)
        try:
            connection = workers.connect()
            alive = [worker for worker in workers.list_workers(connection) if worker.is_alive]
            yield from _workers(alive, workers.queue_lengths(connection, served_queues()))
        except redis.RedisError as error:
            up["redis"] = 0
            log.warning("no metrics of Redis: %s", type(error).__name__)
        yield _family("up", "Whether this server reaches it.", ["part"], {(part,): n for part, n in up.items()})
        try:
            free = shutil.disk_usage(settings.INSPECTOR_DATA).free
            yield _family("disk_free_bytes", "Room on the disk of this server's data folder.", [], {(): free})
        except OSError:
            log.warning("no metrics of the disk: the data folder cannot be read")


def _kept_figures() -> Stored:
    figures = recall("metrics:stored", Stored)
    if figures is None:
        keep("metrics:stored", figures := stored(), STORED_SECONDS)
    return figures


def _work(work: Workload) -> Iterator[GaugeMetricFamily]:
    yield _family("jobs", "Jobs that wait or are under way.", ["kind", "state"], work.jobs)
    yield _family(
        "job_oldest_waiting_seconds", "How long the oldest waiting job has waited; 0 = none waits.", ["kind"],
        {(kind,): work.job_seconds.get(kind, 0.0) for kind in JOB_KINDS},
    )
    yield _family("runs", "Runs that wait or are under way.", ["kind", "state"], work.runs)
    waiting = {(kind,): seconds for kind, seconds in work.run_seconds.items()}
    yield _family("run_oldest_waiting_seconds", "How long the oldest waiting run has waited.", ["kind"], waiting)
    live = _summed(((model if model in settings.INSPECTOR_MODELS else OTHER,), n) for model, n in work.live.items())
    yield _family("live_trajectories", "Trajectories that are being sampled.", ["model"], live)


def _stored(figures: Stored) -> Iterator[GaugeMetricFamily]:
    for name, n in figures.totals.items():
        what = name.removeprefix("n_")
        yield _family(f"stored_{what}", f"The sum over all runs: {what}.", [], {(): n})
    findings = _summed(((kind if kind in KINDS else OTHER,), n) for kind, n in figures.findings.items())
    yield _family("findings", "Stored findings.", ["kind"], findings)
    ended = {(kind, state): n for kind, states in figures.jobs.items() for state, n in states.items()}
    yield _family("jobs_ended", "Stored jobs that have ended.", ["kind", "state"], ended)
    yield _family("database_bytes", "Size of the database.", [], {(): figures.database_bytes})


def _workers(found: list[workers.WorkerState], lengths: dict[str, int]) -> Iterator[GaugeMetricFamily]:
    queues = served_queues()
    serving = _summed(((queue,), 1) for worker in found for queue in worker.queues if queue in queues)
    none: dict[tuple[str, ...], float] = {(queue,): 0 for queue in queues}
    yield _family("workers", "Workers that live.", ["queue"], none | serving)
    waiting = {(queue,): n for queue, n in lengths.items()}
    yield _family("queue_tasks", "Messages that wait in a queue.", ["queue"], waiting)
    active = _summed(((task if task in TASKS else OTHER,), 1) for worker in found for task in worker.active)
    none = {(task,): 0 for task in TASKS}
    yield _family("tasks", "Tasks under way.", ["task"], none | active)
    rates = _summed(
        ((engine.model if engine.model in settings.INSPECTOR_MODELS else OTHER,), engine.tokens_per_second)
        for worker in found
        for engine in worker.engines
    )
    yield _family("engine_tokens_per_second", "Tokens that engines sample, all workers together.", ["model"], rates)


def _summed(pairs: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    total: dict[tuple[str, ...], float] = {}
    for labels, n in pairs:
        total[labels] = total.get(labels, 0) + n
    return total


def _family(name: str, about: str, labels: list[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"inspector_{name}", about, labels=labels)
    for label_values, value in sorted(values.items()):
        family.add_metric(list(label_values), value)
    return family
