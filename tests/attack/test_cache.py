"""M5: whoever reaches Redis can run no code in the server and break no page."""

import ast
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from celery import current_app
from django.conf import settings as chosen
from django.core.cache import cache, caches
from django.test import Client

import inspector.settings as product
from inspector.server import workers
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job
from rollouts.store.runs import figures
from rollouts.store.runs.runs import start_run
from tests.conftest import ROOT, wait_until
from tests.people import make_member
from tests.samples.product import source_files
from tests.web.samples import stored_run
from tests.web.trajectory_samples import Maker

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # what is cached is no matter of the database


class Touch:
    """Its pickle writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def poisons(trap: Path) -> dict[str, bytes]:
    return {
        "pickle": pickle.dumps(Touch(trap)),
        "noise": b"\xff\xfe\x00nothing",
        "empty": b"",
        "digits": b"9" * 10_000,
        "number": b"7",
        "list": msgspec.msgpack.encode([1, 2, 3]),
        "text": msgspec.msgpack.encode("done"),
        "other keys": msgspec.msgpack.encode({"prefix": 7, "by_status": [], "kinds": None}),
        "depth": b"\x91" * 200_000,
        "length": b"\xdd\xff\xff\xff\xff",
    }


def test_a_poisoned_value_is_a_miss(
    member: Client, live_redis: str, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5: pickles, noise and other shapes in each key: the pages answer as with an empty cache."""
    monkeypatch.setattr(figures, "LARGE", 2)
    run = stored_run(4)
    start_run(run)
    maker = Maker(tiny_tokenizer)
    trajectory = maker.run([maker.conversation("a", turns=3)]).trajectories.get()
    pages = [f"/runs/{run.code}.json", f"/runs/{run.code}/cost.json", f"/trajectories/{trajectory.code}/deltas.json"]
    right = [member.get(page).json() for page in pages]
    connection = redis.Redis.from_url(live_redis)
    cache.set("heartbeat:default", "a worker", 60)
    keys = [key for key in connection.keys("inspector:*") if b"figures" in key or b"delta" in key or b"heart" in key]
    assert len(keys) == 4  # the summary, the cost, the renders and the heartbeat
    trap = tmp_path / "trap"
    for name, poison in poisons(trap).items():
        for key in keys:
            connection.set(key, poison)
        assert [member.get(page).json() for page in pages] == right, name
        assert member.get("/health").status_code == 503, name
    for key in keys:
        connection.delete(key)
        connection.rpush(key, b"another type")
    assert [member.get(page).json() for page in pages] == right and member.get("/health").status_code == 503
    assert not trap.exists()


def test_a_poisoned_counter_of_passwords_breaks_no_login(
    live_redis: str, tmp_path: Path, django_user_model: Any
) -> None:
    """M5: the counter of tries is noise, or no number: the password is still asked for."""
    make_member("bob", password="a long password")
    connection = redis.Redis.from_url(live_redis)
    wrong = {"username": "bob", "password": "wrong"}
    assert Client().post("/login", wrong).status_code == 200
    keys = [key for key in connection.keys("inspector:*") if b"rl:" in key]
    assert keys
    for poison in poisons(tmp_path / "trap").values():
        for key in keys:
            connection.set(key, poison)
        assert Client().post("/login", wrong).status_code in (200, 429)
    for key in keys:
        connection.delete(key)
    assert Client().post("/login", wrong | {"password": "a long password"}).status_code == 302
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("entry", [b"[]", b'"text"', b"7", b"[" * 100_000, b'{"name": 7}', b"\xff", b"null"])
def test_a_poisoned_entry_of_a_worker_is_removed(member: Client, live_redis: str, entry: bytes) -> None:
    """M5: the Workers page reads entries that anybody may have written."""
    connection = redis.Redis.from_url(live_redis)
    connection.hset(workers.KEY, "stranger", entry)
    assert member.get("/workers").status_code == 200 and connection.hlen(workers.KEY) == 0


def test_the_pages_answer_without_redis(member: Client, absent_redis: None) -> None:
    """M5: what reads in the cache goes on when nothing answers there."""
    run = stored_run(4)
    for page in ("/", f"/runs/{run.code}", "/workers"):
        assert member.get(page).status_code == 200
    assert Client().get("/health").status_code == 503
    make_member("carol", password="a long password")
    assert Client().post("/login", {"username": "carol", "password": "wrong password"}).status_code == 200
    assert Client().post("/login", {"username": "carol", "password": "a long password"}).status_code == 302


@pytest.mark.parametrize("without_address", [False, True])
def test_tries_are_counted_without_redis(
    member: Client, absent_redis: None, settings: Any, without_address: bool
) -> None:
    """T2: each web process counts for itself then. Clients that come without an address are counted together."""
    caches["counts"].clear()
    settings.API_RATE = "5/m"
    client = Client(REMOTE_ADDR="" if without_address else "192.0.2.7")
    wrong = {"username": "ada", "password": "wrong password"}
    assert [client.post("/login", wrong).status_code for _ in range(11)] == [200] * 10 + [429]
    key = {"HTTP_AUTHORIZATION": "Bearer ri_wrong"}
    assert [client.get("/api/v1/runs", **key).status_code for _ in range(31)] == [401] * 30 + [429]
    assert [client.get(f"/s/{n:032}").status_code for n in range(32)] == [404] * 31 + [429]
    assert [member.get("/api/v1/runs").status_code for _ in range(6)] == [200] * 5 + [429]


def test_a_count_that_redis_loses_goes_on_in_memory(live_redis: str, settings: Any) -> None:
    """T2: a full Redis refuses each write. What is counted there begins again once, and is bounded."""
    caches["counts"].clear()
    client, wrong = Client(), {"username": "ada", "password": "wrong password"}
    assert [client.post("/login", wrong).status_code for _ in range(9)] == [200] * 9
    connection = redis.Redis.from_url(live_redis)
    connection.config_set("maxmemory", 1)
    try:
        statuses = [client.post("/login", wrong).status_code for _ in range(12)]
    finally:
        connection.config_set("maxmemory", 0)
    assert statuses == [200] * 10 + [429] * 2


@pytest.mark.django_db(transaction=True)
def test_a_worker_reads_no_pickle_from_its_queue(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """M5: a message that holds a pickle is dropped unread, and the next job is done."""
    worker = celery_worker_process("default", threads=1)
    job = ask_job(stored_run(2), "diagnose")[0]
    with current_app.connection_for_write() as broker:
        broker.Producer(serializer="pickle").publish(
            Touch(tmp_path / "trap"), exchange="default", routing_key="default"
        )
    assert not send_job(job)
    wait_until(lambda: Job.objects.get(pk=job.pk).status == "done", 60, "the job is done")
    assert worker.poll() is None and not (tmp_path / "trap").exists()
    assert "untrusted content of type pickle" in (tmp_path / "worker-0.log").read_text()


def test_nothing_of_the_server_unpickles_what_it_did_not_write() -> None:
    """M5: cache, sessions and tasks are MessagePack or JSON. Pickles come from own child processes, or by a command."""
    assert product.CACHES["default"]["OPTIONS"]["serializer"] == "inspector.server.page_cache.MsgpackSerializer"
    assert product.CELERY_TASK_SERIALIZER == "json" and product.CELERY_ACCEPT_CONTENT == ["json"]
    assert chosen.SESSION_ENGINE.endswith(".db") and chosen.SESSION_SERIALIZER.endswith("JSONSerializer")
    reading = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if {"pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"} & set(names):
                reading.add(path.relative_to(ROOT).as_posix())
    assert reading == {"rollouts/sampling/engines/engine_process.py", "tools/pickles/unpickling.py"}
