"""A disk that is really full: a small one in memory, on which everything of a server lies."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import OperationalError, connection
from django.test import Client as DjangoClient

from inspector.server.metrics_folder import FOLDER
from rollout_inspector.client.client import Client, ServerError
from rollouts.store.jobs.jobs import adopt_jobs, ask_job, take_job
from rollouts.store.outages import BUSY, READ_ONLY, said_of
from rollouts.worker import jobs
from tests import faults
from tests.conftest import ROOT, wait_until
from tests.faults import SmallDisk
from tests.people import make_member
from tests.samples.server import LINK, PAGES, Visitor, gym_lines, processes_of, serving
from tests.web.samples import stored_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a disk in memory")
FULL = "The disk of the server is full."


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path / "disk", 256)
    yield made
    made.close()


@pytest.fixture
def member() -> DjangoClient:
    client = DjangoClient()
    client.force_login(make_member("ada"))
    return client


def web_processes(data: Path) -> set[int]:
    return set(processes_of(data, b"gunicorn"))


def test_a_full_disk_ends_no_process_and_loses_no_work(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6 to L8: all that the server writes lies on a disk that fills in the middle of an import."""
    temporary = disk.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    data = disk.folder / "data"
    with serving(data) as (_, said):
        found = LINK.search(said.read_text())
        assert found is not None
        visitor = Visitor(found[1])
        token = re.search(r"ri_[\w-]{30,}", visitor.submit("/tokens", data={"name": "trainer", "scopes": "push"}).text)
        assert token is not None
        trainer = Client(visitor.url, token[0], tries=1)
        trainer.create_run("pushed")
        uploads = [("files", ("a.jsonl", gym_lines(0, 5))), ("files", ("b.jsonl", gym_lines(10, 4000)))]
        run = visitor.submit("/import.json", data={"format": "auto"}, files=uploads).json()["code"]

        def n_stored() -> int:
            return int(visitor.ask(f"/api/v1/runs/{run}").json()["trajectories"])

        wait_until(lambda: n_stored() > 0, 120, "a file is stored")
        disk.fill()
        before = web_processes(data)
        for path in PAGES:
            assert visitor.ask(path).status_code in (200, 404), path
        health = visitor.ask("/health")
        assert health.status_code == 503 and "0 MB left" in health.json()["disk"]
        upload = {"files": ("c.jsonl", b"{}" * 300_000)}
        for path, more in (
            ("/import", {"files": upload}), ("/import.json", {"files": upload}), ("/api/v1/imports", {"files": upload}),
            ("/tokenizers", {"files": {"upload": ("tokenizer.json", b"{}" * 300_000)}}),
            ("/tokens", {"data": {"name": "x", "scopes": "push"}}), ("/projects", {"data": {"name": "x"}}),
        ):
            disk.fill()  # what the import let go
            answer = visitor.submit(path, **more)
            assert answer.status_code == 507 and FULL in answer.text, (path, answer.status_code, answer.text[-500:])
        with pytest.raises(ServerError, match="disk of the server is full") as refused:
            trainer.push(gym_lines(0, 3).splitlines(), prefix="")
        assert refused.value.status == 507
        stranger = requests.get(f"{visitor.url}/login?token=wrong", timeout=60)
        assert stranger.status_code == 403
        counted = visitor.ask("/metrics").text
        assert 'status="507"' in counted and web_processes(data) == before
        assert n_stored() < 4005
        disk.make_room()
        wait_until(lambda: visitor.ask("/health").status_code == 200, 120, "the server is well again")
        trainer.push(gym_lines(0, 3).splitlines(), prefix="")
        wait_until(lambda: visitor.ask(f"/api/v1/runs/{run}").json()["status"] == "done", 240, "the import ends")
        assert n_stored() == 4005 and web_processes(data) == before
        assert not list(temporary.rglob("*.upload"))


COUNTING = """
import os, sys
from pathlib import Path
from inspector.server import metrics_folder
folder, lock = metrics_folder.claim_folder(Path(sys.argv[1]))
os.environ[metrics_folder.FOLDER] = str(folder)
metrics_folder.allocate_counters()
from prometheus_client import Counter
counter = Counter("x", "x", ["view"])
counter.labels("a").inc()
filler = open(Path(sys.argv[1]) / "filler", "wb", buffering=0)
try:
    while filler.write(b"x" * 512):
        pass
except OSError:
    pass
refused = 0
for n in range(2000):
    try:
        counter.labels(f"a view with a long name {n}").inc()
    except OSError:
        refused += 1
counter.labels("a").inc()
other = Counter("y", "y", ["view"])
print(refused, counter.labels("a")._value.get())
"""


def test_counters_on_a_full_disk_are_an_error_and_no_signal(tmp_path: Path) -> None:
    """Without the allocation this process ends by SIGBUS."""
    disk = SmallDisk(tmp_path / "disk", 1)
    try:
        environment = {name: value for name, value in os.environ.items() if name != FOLDER}
        command = [sys.executable, "-c", COUNTING, str(disk.folder)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        refused, counted = done.stdout.split()
        assert int(refused) > 0 and float(counted) == 2
    finally:
        disk.close()


@pytest.mark.django_db
def test_a_read_only_disk_is_named(tmp_path: Path, settings: Any, member: DjangoClient) -> None:
    disk = SmallDisk(tmp_path / "disk", 2)
    try:
        settings.INSPECTOR_DATA = disk.folder
        settings.FILE_UPLOAD_TEMP_DIR = str(disk.folder)
        job = ask_job(stored_run(2), "export", {"format": "own_jsonl"})[0]
        disk.set_read_only(True)
        member.raise_request_exception = False
        answer = member.post("/import", {"files": SimpleUploadedFile("a.jsonl", b"{}" * 9), "format": "auto"})
        assert answer.status_code == 507 and READ_ONLY in answer.content.decode()
        jobs.do_job(job.pk)
        job.refresh_from_db()
        assert (job.status, job.error) == ("running", READ_ONLY)
        disk.set_read_only(False)
        faults.let_time_pass()
        adopt_jobs()
        jobs.do_job(job.pk)
        job.refresh_from_db()
        assert (job.status, job.error) == ("done", "")
    finally:
        disk.close()


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_read_only_database_is_named(member: DjangoClient) -> None:
    member.raise_request_exception = False
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA query_only = 1")
        answer = member.post("/tokens", {"name": "x", "scopes": "push"})
        cursor.execute("PRAGMA query_only = 0")
    assert answer.status_code == 507 and READ_ONLY in answer.content.decode()


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_busy_database_is_named(member: DjangoClient) -> None:
    """Somebody writes for longer than a page waits: the page says so, and never `database is locked`."""
    member.raise_request_exception = False
    job = ask_job(stored_run(2), "export", {"format": "own_jsonl"})[0]
    taken = take_job(job.pk)
    assert taken is not None
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    with contextlib.closing(other), connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 50")
        other.execute("BEGIN IMMEDIATE")
        answer = member.post("/tokens", {"name": "x", "scopes": "push"})
        twin = member.post("/import.json", {"files": SimpleUploadedFile("a.jsonl", b"{}"), "format": "auto"})
        with pytest.raises(OperationalError) as locked:
            taken.save()
        other.execute("ROLLBACK")
    assert (answer.status_code, answer["Retry-After"]) == (503, "30") and BUSY in answer.content.decode()
    assert twin.status_code == 503 and twin.json()["error"].startswith(BUSY)
    assert said_of(locked.value) == BUSY
