"""A Redis that has no memory left: it answers what is read, and refuses what is written."""

import subprocess
import sys
from pathlib import Path

import pytest
import redis
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.server.paths import embedded_redis_socket
from inspector.web.login import make_token
from rollouts.jobs.broker import REDIS_FULL, redis_fault
from rollouts.store.models import Run
from tests.conftest import ROOT, wait_until
from tests.people import make_member
from tests.samples.server import LINK, PAGES, Visitor, environment, gym_lines, processes_of, serving


def fill(connection: redis.Redis) -> None:
    """Leave no memory; one key is what takes it."""
    used = connection.info("memory")["used_memory"]  # type: ignore[index]
    connection.config_set("maxmemory", used + (4 << 20))
    for size in (65536, 1024, 16):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            while True:
                connection.append("filler", b"x" * size)


def test_a_full_redis_loses_no_work_and_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as (_, said):
        link = LINK.search(said.read_text())
        assert link is not None
        visitor = Visitor(link[1])
        wait_until(lambda: visitor.ask("/health").status_code == 200, 60, "the workers are there")
        connection = redis.Redis(unix_socket_path=str(embedded_redis_socket(data)))

        def ask_import(first: int) -> dict[str, str]:
            uploads = [("files", (f"{first}.jsonl", gym_lines(first, 1000)))]
            run: dict[str, str] = visitor.submit("/import.json", data={"format": "auto"}, files=uploads).json()
            return run

        def status_of(run: str) -> str:
            return str(visitor.ask(f"/api/v1/runs/{run}").json()["status"])

        def living() -> list[list[int]]:
            return [processes_of(data, word) for word in (b"gunicorn", b"celery")]

        waiting = [ask_import(1000 * n)["code"] for n in range(6)]  # more than the workers take at once
        before = living()
        fill(connection)
        # A worker that connects again asks for its queues, which is a write.
        assert connection.client_kill_filter(_type="normal", skipme=True) > len(before[1])
        for path in PAGES:
            assert visitor.ask(path).status_code in (200, 404), path
        health = visitor.ask("/health")
        assert health.status_code == 503 and health.json()["redis"] == REDIS_FULL
        assert REDIS_FULL in visitor.ask("/workers").text
        refused = ask_import(9000)
        assert refused["status"] == "failed" and REDIS_FULL in refused["error"]
        launched = visitor.ask("/api/v1" + visitor.submit("/runs/demo").headers["Location"]).json()
        assert launched["status"] == "failed" and REDIS_FULL in launched["error"]
        command = [sys.executable, "manage.py", "login_link"]
        another = subprocess.check_output(command, cwd=ROOT, env=environment(data), text=True)
        assert Visitor(another.strip()).ask("/account").status_code == 200
        doctor = subprocess.run(
            [sys.executable, "manage.py", "doctor"], cwd=ROOT, env=environment(data), capture_output=True, text=True,
            check=False,
        )
        assert doctor.returncode == 1 and f"Harmful: {REDIS_FULL}" in doctor.stdout
        connection.delete("filler")
        assert visitor.submit(f"/runs/{refused['code']}/resume").status_code == 302
        for run in (*waiting, refused["code"]):
            wait_until(lambda run=run: status_of(run) == "done", 180, f"the import {run} ends")  # type: ignore[misc]
            assert visitor.ask(f"/api/v1/runs/{run}").json()["trajectories"] == 1000
        wait_until(lambda: visitor.ask("/health").status_code == 200, 60, "the server is well again")
        assert living() == before, said.read_text()


@pytest.mark.django_db
def test_without_redis_each_page_answers_and_work_is_refused_with_a_sentence(absent_redis: None) -> None:
    get_user_model().objects.create_user("grace", password="correct horse")
    for way in ({"username": "grace", "password": "correct horse"}, None):
        visitor = Client()
        answer = visitor.post("/login", way) if way else visitor.get("/login", {"token": make_token("grace")})
        assert answer.status_code == 302 and visitor.get("/account").status_code == 200
    client = Client()
    client.force_login(make_member("ada"))
    for path in PAGES:
        assert client.get(path, follow=True).status_code in (200, 404), path
    assert client.post("/runs/demo").status_code == 302
    run = Run.objects.get()
    assert run.status == "failed" and "Redis does not answer" in run.error
    assert run.error in client.get(f"/runs/{run.code}").content.decode()


@pytest.mark.parametrize(("error", "sentence"), [
    (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), REDIS_FULL),
    (redis.ReadOnlyError("You can't write against a read only replica."), "Redis refuses a write: You can't"),
    (redis.ConnectionError("refused"), "Redis does not answer (ConnectionError)."),
])
def test_each_way_to_refuse_has_a_sentence(error: Exception, sentence: str) -> None:
    assert redis_fault(error).startswith(sentence)
