"""What is lost between machines while they work, and what must be there afterwards."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollout_inspector.client.client import Client
from rollouts.store.models import Run, WorkStatus
from rollouts.store.people.shares import create_api_key
from tests.conftest import database_url, wait_until
from tests.faults import children_of
from tests.machines.conftest import Browser, Machines
from tests.machines.gates import Gate, OwnRedis
from tests.s3 import S3Server
from tests.samples.machine_work import has_ended, launched

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only]

OUTAGE_SECONDS = 2.0


def storage_process(machine_pid: int) -> int | None:
    """The process that stores for an engine worker."""
    for child in children_of(machine_pid):
        if b"import storage_process;" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    return None


@pytest.fixture(scope="module")
def own_redis() -> Iterator[OwnRedis]:
    found = OwnRedis()
    yield found
    found.close()


@pytest.fixture(scope="module")
def redis_url(own_redis: OwnRedis) -> str:
    return own_redis.url


@pytest.fixture
def gate(transactional_db: None) -> Iterator[Gate]:
    """Between the machines and the database. The test itself goes around it."""
    address = urlsplit(database_url())
    found = Gate(address.hostname or "127.0.0.1", address.port or 5432)
    yield found
    found.close()


@pytest.fixture
def machine_environment(gate: Gate) -> dict[str, str]:
    address = urlsplit(database_url())
    login = address.netloc.rpartition("@")[0]
    return {"DATABASE_URL": address._replace(netloc=f"{login}@127.0.0.1:{gate.port}").geturl()}


def assert_whole(code: str, n: int) -> None:
    """The run has ended well; each trajectory is there once, with all of its steps."""
    run = Run.objects.get(code=code)
    assert (run.status, run.error, run.n_trajectories) == (WorkStatus.DONE, "", n)
    found = list(run.trajectories.all())
    assert len(found) == len({one.external_id for one in found}) == n
    assert {one.status for one in found} == {WorkStatus.DONE}
    assert all(one.n_steps == one.steps.count() > 0 and one.rows.count() == one.n_rows > 0 for one in found)


def test_nothing_is_lost_with_a_machine_a_connection_or_the_storage(
    machines: Machines, browser: Browser, s3: S3Server, gate: Gate, own_redis: OwnRedis, django_user_model: type
) -> None:
    small = launched(browser)
    browser.wait(f"/runs/{small}.json", has_ended)
    lines = browser.ask(f"/runs/{small}/export?format=own_jsonl")

    # A run loses its storage process, the database for some seconds, Redis, and then the machine of the engine.
    large = launched(browser, prompts="24", group="4")
    browser.wait(f"/runs/{large}.json", lambda page: page["progress"]["done"] > 2)
    storing = storage_process(machines.engine.processes["engine"].pid)
    assert storing is not None
    os.kill(storing, signal.SIGKILL)
    gate.shut()
    time.sleep(OUTAGE_SECONDS)
    before = Run.objects.get(code=large).n_steps
    gate.open()
    own_redis.kill()
    time.sleep(OUTAGE_SECONDS)
    own_redis.start()
    wait_until(lambda: Run.objects.get(code=large).n_steps > before, 240, "the launch goes on")
    machines.engine.kill("engine")
    machines.start_engine()

    # While the storage does not answer, an upload is refused with a sentence; afterwards it is taken.
    files = {"files": ("again.jsonl", lines)}
    form = {"name": "again", "format": "auto", "tokenizer": ""}
    s3.stop()
    try:
        refused = browser.press("/import.json", form, least_refusal=600, files=files)
        assert refused.status_code == 503 and refused.json()["error"].endswith("."), refused.text
    finally:
        s3.start()
    imported = browser.press("/import.json", form, files=files).json()["code"]
    machines.worker.kill("worker")
    machines.start_worker()

    # A trainer pushes on while the web server is killed and started again.
    _, token = create_api_key(django_user_model.objects.get(username="ada"), "trainer")
    client = Client(machines.url, token, tries=60)
    client.create_run("pushed")
    client.push(lines.splitlines(), prefix="before ")
    machines.web.kill("web")
    machines.start_web()
    client.push(lines.splitlines(), prefix="after ")
    wait_until(machines.is_up, 240, "the web server answers again")

    for code, n in ((large, 96), (imported, 4)):
        browser.wait(f"/runs/{code}.json", has_ended)
        assert_whole(code, n)
    pushed = Run.objects.get(code=client.run).trajectories
    assert pushed.count() == 8 and {one.n_steps == one.steps.count() for one in pushed.all()} == {True}
