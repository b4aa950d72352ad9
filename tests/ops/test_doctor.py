"""`manage.py doctor`: what machines share, what differs between them, and what the Workers page says of it."""

import io
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db import connection
from django.test import Client

from inspector.server import machines, workers
from inspector.server.machines import Machine
from rollouts.store import files, storage_mark
from rollouts.store.models import Job, Run
from rollouts.store.people.accounts import local_user
from tests.conftest import wait_until

pytestmark = pytest.mark.django_db


@pytest.fixture
def here(settings: Any) -> Machine:
    return machines.describe("web-1@a", "web")


def doctor(*options: str) -> tuple[str, str]:
    """What it prints, and its error; empty = it ended with status 0."""
    out = io.StringIO()
    try:
        call_command("doctor", *options, stdout=out)
    except CommandError as error:
        return out.getvalue(), str(error)
    return out.getvalue(), ""


def serve_all(name: str = "worker@a") -> None:
    now = time.time()
    workers.announce(workers.connect(), workers.WorkerState(name, ["default", "engine.demo"], 7, 2, [], now, now))


def test_machines_that_are_alike_have_no_difference(here: Machine, live_redis: str) -> None:
    serve_all()
    for one in (here, replace(here, name="worker@b", role="worker", host=here.host, queues=["default"])):
        machines.tell(workers.connect(), one)
    said, error = doctor()
    assert error == "" and "Nothing differs." in said
    assert "web-1@a: web on" in said and "worker@b: worker on" in said and "queues default" in said


@pytest.mark.parametrize(
    ("change", "sentence", "is_harmful"),
    [
        ({"database": "other", "files_of": "other"}, "The database differs. ", True),
        ({"files_of": "other"}, "The file storage belongs to another database (other; ", True),
        ({"files": "other"}, "Give all of them the same INSPECTOR_FILES.", True),
        ({"secret": "other"}, "SECRET_KEY differs. ", True),
        ({"code": "other"}, "Install the same version and start them again.", True),
        ({"host": "b", "database_kind": "sqlite"}, "SQLite is a file of one machine", True),
        ({"clock_seconds": 7.5}, "is 7.5 s ahead of the database's.", True),
        ({"clock_seconds": -3.0}, "is 3.0 s behind the database's.", True),
        ({"free_bytes": 5 << 20}, "has 5 MB left. Make room.", True),
        ({"python": "3.99.1"}, "Python differs. ", False),
        ({"packages": {"transformers": "4.0"}}, "transformers differs. ", False),
    ],
)
def test_each_difference_is_a_sentence(here: Machine, change: dict[str, Any], sentence: str, is_harmful: bool) -> None:
    other = replace(here, name="worker@b", **change)
    ((said, harms),) = machines.differences([here, other])
    assert sentence in said and harms is is_harmful
    assert "worker@b" in said or "b" in said
    assert machines.differences([here, replace(here, name="worker@b")]) == []


def test_what_one_lacks_altogether_is_no_difference(here: Machine) -> None:
    """A worker without a GPU has no vLLM, and a worker with one has it."""
    assert machines.differences([here, replace(here, name="b", packages={**here.packages, "vllm": "1"})]) == []


def test_a_patch_release_of_python_is_no_difference(here: Machine) -> None:
    assert machines.differences([replace(here, python="3.11.2"), replace(here, name="b", python="3.11.9")]) == []


def test_no_key_is_told(here: Machine, settings: Any) -> None:
    assert settings.SECRET_KEY not in str(here) and len(here.secret) == 12
    settings.SECRET_KEY = "another key that is long enough to be one"
    assert machines.describe("b", "web").secret != here.secret


def test_a_storage_is_told_from_another(here: Machine, settings: Any, tmp_path: Any) -> None:
    assert machines.describe("b", "web").files == here.files
    files.delete(machines.MARK)
    assert machines.describe("b", "web").files != here.files


def test_files_of_another_database_do_harm_until_they_are_adopted(here: Machine, live_redis: str) -> None:
    serve_all()
    files.put(storage_mark.MARK, io.BytesIO(b"another"))
    said, error = doctor()
    assert "Harmful: The file storage belongs to another database (another; " in said
    assert error == "One of these does harm."
    with pytest.raises(SystemCheckError, match="belongs to another database"):
        call_command("check", databases=["default"])
    said, error = doctor("--adopt-files")
    assert error == "" and storage_mark.marked() == here.database
    call_command("check", databases=["default"], stdout=io.StringIO())


def test_the_clock_is_compared_with_that_of_another_machine(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.vendor == "sqlite":
        assert here.clock_seconds is None
        return
    assert here.clock_seconds is not None and abs(here.clock_seconds) < 60
    real = time.time
    monkeypatch.setattr("rollouts.store.database.time.time", lambda: real() + 3600)
    assert machines.describe("b", "web").clock_seconds == pytest.approx(3600, abs=60)


def test_harm_is_status_one_and_says_what_to_do(here: Machine, live_redis: str) -> None:
    serve_all()
    machines.tell(workers.connect(), replace(here, name="worker@b", secret="other"))
    said, error = doctor()
    assert "Harmful: SECRET_KEY differs." in said and error == "One of these does harm."
    machines.tell(workers.connect(), replace(here, name="worker@b", python="3.99.0"))
    said, error = doctor()
    assert "Note: Python differs." in said and error == ""


def test_a_queue_without_a_worker_and_work_of_workers_elsewhere(live_redis: str) -> None:
    run = Run.objects.create(name="a", kind=Run.Kind.IMPORT)
    Job.objects.create(run=run, kind="export", status=Job.Status.RUNNING)
    said, error = doctor("--json")
    sentences = " ".join(one["sentence"] for one in json.loads(said)["differences"])
    assert "No worker of this Redis serves the queue default." in sentences and error == "3 of these do harm."
    assert "1 jobs are under way in this database, and this Redis knows no worker." in sentences


def test_without_redis_or_storage_it_says_so(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert "Harmful: Redis does not answer" in doctor()[0]

    def fails(key: str) -> Any:
        raise files.StorageDown("The file storage did not answer (Timeout).")

    monkeypatch.setattr(files, "open_file", fails)
    assert doctor()[1] == (
        "This machine cannot use what the machines share. The file storage did not answer (Timeout)."
    )


def test_who_has_not_told_lately_and_what_cannot_be_read_is_forgotten(here: Machine, live_redis: str) -> None:
    redis = workers.connect()
    machines.tell(redis, replace(here, seen_at=time.time() - 2 * machines.LIVES_SECONDS))
    redis.hset(machines.KEY, "other", '{"from": "another version"}')
    assert machines.list_machines(redis) == [] and redis.hlen(machines.KEY) == 0
    machines.tell(redis, here)
    machines.withdraw(redis, here.name)
    assert machines.list_machines(redis) == []


def test_the_workers_page_says_what_does_harm(here: Machine, live_redis: str) -> None:
    client = Client()
    client.force_login(local_user())
    assert client.get("/workers.json").json()["differences"] == []
    machines.tell(workers.connect(), here)
    machines.tell(workers.connect(), replace(here, name="<b>@c", files="other", python="3.99.0"))
    (sentence,) = client.get("/workers.json").json()["differences"]
    assert sentence.startswith("The file storage differs.")
    page = client.get("/workers").content.decode()
    assert "The file storage differs." in page and "&lt;b&gt;@c" in page and "<b>@c" not in page


@pytest.mark.sqlite_only
def test_a_worker_tells_of_itself_and_withdraws(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], settings: Any
) -> None:
    worker = celery_worker_process("engine.demo", threads=1)
    wait_until(lambda: bool(machines.list_machines(workers.connect())), 240, "the worker has told of itself")
    (machine,) = machines.list_machines(workers.connect())
    assert machine.role == "worker" and machine.queues == ["engine.demo"]
    own = machines.describe("here", "command")
    assert (machine.code, machine.database, machine.packages) == (own.code, own.database, own.packages)
    worker.terminate()
    assert worker.wait(60) == 0
    assert machines.list_machines(workers.connect()) == []
