"""`/metrics`: who may read it, what it says, and that it costs a number of queries that does not grow."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from inspector.server import workers
from inspector.server.metrics_folder import claim_folder
from inspector.server.system_checks import check_metrics_token
from rollouts.store.models import Job, Run
from tests.conftest import ROOT

pytestmark = pytest.mark.django_db
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def local(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["localhost", "127.0.0.1", "testserver"]
    cache.clear()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) -> value."""
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read(**headers: str) -> dict[tuple[str, ...], float]:
    answer = Client().get("/metrics", headers=headers)
    assert answer.status_code == 200 and answer["Content-Type"].startswith("text/plain"), answer.content
    return samples(answer.content.decode())


# --- who may ask


def test_this_machine_may_ask_and_others_get_the_404_of_any_address(settings: Any) -> None:
    assert Client().get("/metrics").status_code == 200
    assert Client(REMOTE_ADDR="10.0.0.9").get("/metrics").status_code == 404
    for name in ("X-Forwarded-For", "Forwarded", "X-Real-Ip"):
        assert Client().get("/metrics", headers={name: "127.0.0.1"}).status_code == 404, name
    settings.ALLOWED_HOSTS = ["testserver", "inspector.example"]
    assert Client().get("/metrics").status_code == 404  # a proxy may pass on requests of others
    settings.ALLOWED_HOSTS, settings.HTTPS = ["testserver"], True
    assert Client().get("/metrics").status_code == 404


def test_a_member_of_another_machine_may_not_ask(admin_client: Client) -> None:
    assert admin_client.get("/metrics", REMOTE_ADDR="10.0.0.9").status_code == 404


def test_a_token_opens_it_from_everywhere_and_nothing_else_does(settings: Any) -> None:
    settings.METRICS_TOKEN, settings.ALLOWED_HOSTS = TOKEN, ["testserver", "inspector.example"]
    far = Client(REMOTE_ADDR="10.0.0.9")
    assert far.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    for said in ("", f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer tökén"):
        for client in (far, Client()):
            answer = client.get("/metrics", headers={"Authorization": said} if said else {})
            assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer"), said
            assert b"inspector_" not in answer.content


def test_a_short_token_is_an_error_of_the_check(settings: Any) -> None:
    assert list(check_metrics_token()) == []
    settings.METRICS_TOKEN = "secret"
    assert [found.id for found in check_metrics_token()] == ["inspector.E030"]


# --- what it says


def test_requests_are_counted_by_view_without_their_addresses() -> None:
    before = read()
    Client().get("/login?next=/runs/secretcode")
    Client().get("/runs/secretcode/nowhere")
    Client().generic("BREW", "/login")
    after = read()

    def more(*key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    assert more("inspector_requests_total", "GET", "200", "login") == 1
    assert more("inspector_requests_total", "GET", "404", "none") == 1
    assert [key[1] for key in after if key[0] == "inspector_requests_total" and key[3] == "login"].count("other") == 1
    assert (
        more("inspector_request_seconds_count", "login")
        == 2
        == more("inspector_request_seconds_bucket", "+Inf", "login")
    )
    assert not any("secretcode" in part for key in after for part in key)


def test_work_and_stored_data(live_redis: str) -> None:
    run = Run.objects.create(
        name="a name", kind=Run.Kind.IMPORT, status=Run.Status.DONE, n_trajectories=3, n_tokens=70,
        finding_counts={"boundary_merge": 2, "a kind of a stranger": 1},
    )
    Job.objects.create(run=run, kind="diagnose")
    Job.objects.create(run=run, kind="export", status=Job.Status.FAILED)
    launch = Run.objects.create(name="live", kind=Run.Kind.LAUNCH, status=Run.Status.RUNNING, model="demo")
    other = Run.objects.create(name="live", kind=Run.Kind.LAUNCH, status=Run.Status.RUNNING, model="of a stranger")
    for of, n in ((launch, 2), (other, 1)):
        for index in range(n):
            of.trajectories.create(index=index, external_id=str(index), status="running")
    now = time.time()
    engines = [workers.EngineState("demo", "transformers", 1200, 350.5)]
    for name in ("a@host", "b@host"):
        state = workers.WorkerState(name, ["engine.demo"], 7, 4, ["rollouts.run_rollouts"], now, now, engines)
        workers.announce(workers.connect(), state)
    workers.connect().rpush("engine.demo", "a task")
    found = read()
    expected = {
        ("inspector_jobs", "diagnose", "queued"): 1, ("inspector_jobs_ended", "export", "failed"): 1,
        ("inspector_runs", "launch", "running"): 2, ("inspector_live_trajectories", "demo"): 2,
        ("inspector_live_trajectories", "other"): 1, ("inspector_findings", "boundary_merge"): 2,
        ("inspector_findings", "other"): 1, ("inspector_stored_trajectories",): 3, ("inspector_stored_tokens",): 70,
        ("inspector_stored_runs",): 3, ("inspector_workers", "engine.demo"): 2, ("inspector_workers", "default"): 0,
        ("inspector_tasks", "rollouts.run_rollouts"): 2, ("inspector_queue_tasks", "engine.demo"): 1,
        ("inspector_engine_tokens_per_second", "demo"): 701, ("inspector_up", "database"): 1,
        ("inspector_up", "redis"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert 0 <= found["inspector_job_oldest_waiting_seconds", "diagnose"] < 60
    assert found["inspector_job_oldest_waiting_seconds", "import"] == 0
    assert found["inspector_database_bytes",] > 10_000 and found["inspector_disk_free_bytes",] > 0
    assert not any("stranger" in part or part == "a name" for key in found for part in key)


def test_the_number_of_queries_does_not_grow(django_assert_num_queries: Any) -> None:
    for many in (1, 40):
        for n in range(many):
            run = Run.objects.create(name=str(n), kind=Run.Kind.IMPORT, finding_counts={"branch": 1})
            Job.objects.create(run=run, kind="export")
        cache.clear()
        with django_assert_num_queries(7):
            read()
        with django_assert_num_queries(3):  # what reads every run is kept for a minute
            read()


def test_without_redis_the_rest_is_said(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    found = read()
    assert found["inspector_up", "redis"] == 0 and found["inspector_up", "database"] == 1
    assert ("inspector_stored_runs",) in found and ("inspector_tasks", "rollouts.do_job") not in found


# --- several processes count together


@pytest.mark.sqlite_only
def test_a_folder_is_held_by_one_server_and_taken_again_after_it(tmp_path: Path) -> None:
    first, lock = claim_folder(tmp_path)
    (first / "counter_1.db").write_bytes(b"x")
    second, other = claim_folder(tmp_path)
    assert second != first and (first / "counter_1.db").exists()
    lock.close()
    again, held = claim_folder(tmp_path)
    assert again == first and not (first / "counter_1.db").exists()
    for file in (other, held):
        file.close()


_COUNTS = """
import django, os, sys
django.setup()
from django.test import Client
from prometheus_client import generate_latest
from inspector.server.metrics_view import request_registry
if os.fork() == 0:
    Client().get("/login")
    os._exit(0)
os.wait()
Client().get("/login")
sys.stdout.write(generate_latest(request_registry()).decode())
"""


@pytest.mark.sqlite_only
def test_one_process_answers_for_all(tmp_path: Path) -> None:
    folder, lock = claim_folder(tmp_path)
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PROMETHEUS_MULTIPROC_DIR": str(folder),
        "INSPECTOR_TEST_DATA": str(tmp_path), "DATABASE_URL": "",
    }
    said = subprocess.run(
        [sys.executable, "-c", _COUNTS], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    lock.close()
    assert samples(said)["inspector_requests_total", "GET", "200", "login"] == 2
