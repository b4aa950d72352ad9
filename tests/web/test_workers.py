"""The Workers page: who is there, who has gone silent, what waits, and what it says without Redis."""

import time
from typing import Any

import pytest
from django.test import Client

from inspector.server import workers
from rollouts.store.models import Run
from rollouts.store.people.accounts import local_user
from tests.conftest import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # its queries are those of other pages


def seen(seconds_ago: float = 0) -> workers.WorkerState:
    now = time.time()
    return workers.WorkerState(
        name="engine@host", queues=["engine.demo"], pid=7, slots=4, active=["rollouts.run_rollouts"],
        started_at=now - 60, seen_at=now - seconds_ago,
        engines=[workers.EngineState("demo", "transformers", 1200, 350.5)],
    )


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(local_user())
    return client


def test_a_worker_and_its_queue(client: Client, live_redis: str) -> None:
    connection = workers.connect()
    workers.announce(connection, seen())
    connection.rpush("engine.demo", "a task", "another")
    Run.objects.create(name="waiting", kind=Run.Kind.LAUNCH, model="demo", n_expected=8)
    page = client.get("/workers").content.decode()
    assert "engine@host" in page and "demo on transformers" in page and "waiting" in page and "run rollouts" in page
    twin = client.get("/workers.json").json()
    (queue,) = [queue for queue in twin["queues"] if queue["name"] == "engine.demo"]
    assert queue == {"name": "engine.demo", "waiting": 2, "workers": ["engine@host"], "active": 1, "slots": 4}
    assert twin["workers"][0]["alive"] is True and twin["workers"][0]["engines"][0]["tokens_per_second"] == 350.5


def test_a_silent_worker_is_shown_as_such_and_serves_nothing(client: Client, live_redis: str) -> None:
    workers.announce(workers.connect(), seen(60))
    twin = client.get("/workers.json").json()
    assert twin["workers"][0]["alive"] is False
    assert all(queue["workers"] == [] for queue in twin["queues"])
    assert "silent" in client.get("/workers").content.decode()


def test_a_forgotten_worker_and_an_unreadable_entry_are_removed(live_redis: str) -> None:
    connection = workers.connect()
    workers.announce(connection, seen(2 * workers.FORGOTTEN_SECONDS))
    connection.hset(workers.KEY, "other", '{"from": "another version"}')
    assert workers.list_workers(connection) == [] and connection.hlen(workers.KEY) == 0


def test_without_redis_the_page_says_so(client: Client, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    response = client.get("/workers")
    assert response.status_code == 200 and "Redis does not answer" in response.content.decode()


def test_a_real_worker_announces_itself(client: Client, celery_worker_process: Any) -> None:
    celery_worker_process("default", threads=2)
    wait_until(lambda: bool(workers.list_workers(workers.connect())), 60, "the worker is listed")
    found = workers.list_workers(workers.connect())
    assert [(worker.queues, worker.slots, worker.is_alive) for worker in found] == [(["default"], 2, True)]
