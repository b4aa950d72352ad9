"""The state of each worker: it writes one entry of a Redis hash every two seconds, and the Workers page reads them. The
page does not know the names of the workers, and a cache cannot list its keys: so this is a hash. The inspection
commands of Celery ask every worker and wait for the answers; a page cannot wait."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import redis
from django.conf import settings

KEY = "inspector:workers"
LIVES_SECONDS = 10
"""A worker without a heartbeat for this time is gone. Its heartbeats in the cache expire after the same time."""
FORGOTTEN_SECONDS = 3600
"""After this time the entry of such a worker is removed. Until then the page says that the worker is gone."""
T = TypeVar("T")


@dataclass(frozen=True)
class EngineState:
    """An engine that a worker keeps warm."""

    model: str
    engine: str
    tokens: int  # Sampled since it was built.
    tokens_per_second: float  # Since the last heartbeat.


@dataclass(frozen=True)
class WorkerState:
    """A worker process, as its last heartbeat described it."""

    name: str
    queues: list[str]
    pid: int
    slots: int  # Tasks that the worker can do at once.
    active: list[str]  # Names of the tasks under way.
    started_at: float  # Unix time.
    seen_at: float
    engines: list[EngineState] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        return abs(time.time() - self.seen_at) < LIVES_SECONDS


def connect() -> redis.Redis:
    """A connection with short time limits: a page never waits for a Redis that is gone."""
    return redis.Redis.from_url(settings.REDIS_URL, socket_connect_timeout=2, socket_timeout=3)


def announce(connection: redis.Redis, state: WorkerState) -> None:
    """Write a worker's state. Raises ``redis.RedisError``."""
    connection.hset(KEY, state.name, msgspec.json.encode(state))


def withdraw(connection: redis.Redis, name: str) -> None:
    """Remove the entry of a worker that ends."""
    connection.hdel(KEY, name)


def list_workers(connection: redis.Redis) -> list[WorkerState]:
    """Every worker seen in the last hour, by name. Raises ``redis.RedisError``."""
    return read_entries(connection, KEY, WorkerState, FORGOTTEN_SECONDS)


def read_entries(connection: redis.Redis, key: str, kind: type[T], lives_seconds: float) -> list[T]:
    """The entries of a hash by name; those that are too old, or of another kind, are removed."""
    states: list[Any] = []
    entries: dict[bytes, bytes] = connection.hgetall(key)  # type: ignore[assignment]
    for name, raw in entries.items():
        with suppress(msgspec.DecodeError, ValueError, RecursionError):  # of another version, or of a stranger
            state: Any = msgspec.json.decode(raw, type=kind)
            if time.time() - state.seen_at <= lives_seconds:
                states.append(state)
                continue
        connection.hdel(key, name)
    return sorted(states, key=lambda state: state.name)


def queue_lengths(connection: redis.Redis, queues: list[str]) -> dict[str, int]:
    """Tasks that wait in each queue. Raises ``redis.RedisError``."""
    pipe = connection.pipeline(transaction=False)
    for queue in queues:
        pipe.llen(queue)
    return dict(zip(queues, pipe.execute(), strict=True))


class Describer:
    """Builds the state of this process for each heartbeat. Rates are since the previous state."""

    def __init__(self, name: str, queues: list[str], slots: int) -> None:
        self.name, self.queues, self.slots = name, queues, slots
        self._started = time.time()
        self._last: dict[str, tuple[float, int]] = {}

    def describe(self) -> WorkerState:
        from celery.worker import state as celery_state

        now = time.time()
        return WorkerState(
            name=self.name, queues=self.queues, pid=os.getpid(), slots=self.slots,
            active=sorted(request.name for request in list(celery_state.active_requests)), started_at=self._started,
            seen_at=now, engines=self._engines(now),
        )

    def _engines(self, now: float) -> list[EngineState]:
        from rollouts.jobs.warm_engines import warm_engines

        states = []
        for (model, engine), tokens in warm_engines().items():
            before, had = self._last.get(f"{model}/{engine}", (now, tokens))
            rate = (tokens - had) / (now - before) if now > before else 0.0
            self._last[f"{model}/{engine}"] = (now, tokens)
            states.append(EngineState(model, engine, tokens, round(max(rate, 0.0), 1)))
        return states
