"""Processes that get no more memory, by a real limit of the kernel, while they answer and work."""

import errno
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from django.test import Client

from rollouts.store.outages import NO_MEMORY, is_outage, said_of
from tests.conftest import wait_until
from tests.people import make_member
from tests.samples.server import LINK, PAGES, Visitor, gym_lines, processes_of, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of another process is limited by prlimit")
MARGIN = 256 << 10


def limit(pids: list[int], margin: int | None) -> None:
    """Give these processes so many bytes more than they have; None = as much as they want."""
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):
            kilobytes = re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            if kilobytes is None:  # it has ended, and its parent has not taken notice yet
                continue
            soft = resource.RLIM_INFINITY if margin is None else (int(kilobytes[1]) << 10) + margin
            resource.prlimit(pid, resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


@pytest.mark.django_db
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_a_page_that_gets_no_memory_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    client = Client(raise_request_exception=False)
    client.force_login(make_member("ada"))
    monkeypatch.setattr("inspector.team.api_keys.create_api_key", fails)
    answer = client.post("/tokens", {"name": "x", "scopes": "push"})
    assert answer.status_code == 503 and NO_MEMORY in answer.content.decode()
    assert is_outage(error) and said_of(error) == NO_MEMORY


def test_a_server_without_memory_says_so_and_loses_no_work(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as (_, said):
        link = LINK.search(said.read_text())
        assert link is not None
        visitor = Visitor(link[1])
        wait_until(lambda: visitor.ask("/health").status_code == 200, 60, "the workers are there")

        def state() -> dict[str, object]:
            body: dict[str, object] = visitor.ask(f"/api/v1/runs/{run}").json()
            return body

        uploads = [("files", ("a.jsonl", gym_lines(0, 10))), ("files", ("b.jsonl", gym_lines(100, 3000)))]
        children = processes_of(data, b"celery", b"default")[1:]
        limit(children, MARGIN)
        run = visitor.submit("/import.json", data={"format": "auto"}, files=uploads).json()["code"]
        wait_until(
            lambda: not set(children) <= set(processes_of(data, b"celery", b"default")), 60, "a process is replaced"
        )
        assert state()["status"] != "failed" and state()["trajectories"] in (0, 10)
        # The first gunicorn starts the others, which would have its limit.
        web = processes_of(data, b"gunicorn")[1:]
        limit(web, MARGIN)
        answers = []
        for path in (*PAGES, f"/runs/{run}") * 3:
            with suppress(requests.ConnectionError):  # the process has ended, and another takes its place
                answers.append(visitor.ask(path))
        limit(web, None)
        # CPython and native code may also end by a signal or a SystemError then; no test can say which of these comes.
        assert {answer.status_code for answer in answers} <= {200, 404, 500, 503}
        assert all(NO_MEMORY in answer.text for answer in answers if answer.status_code == 503)
        limit(children, None)
        wait_until(lambda: len(processes_of(data, b"gunicorn")) == len(web) + 1, 60, "each web process lives")
        assert all(visitor.ask(path).status_code in (200, 404) for path in PAGES)
        wait_until(lambda: state()["status"] == "done", 180, "the import ends")
        assert state()["trajectories"] == 3010 and not state()["error"]


def test_a_launch_whose_worker_lacks_memory_is_taken_over(tmp_path: Path) -> None:
    """The kernel kills the engine and the storage process, and the worker gets no memory to start others."""
    data = tmp_path / "data"
    with serving(data) as (_, said):
        link = LINK.search(said.read_text())
        assert link is not None
        visitor = Visitor(link[1])
        wait_until(lambda: visitor.ask("/health").status_code == 200, 60, "the workers are there")
        fields = visitor.ask("/runs/new.json").json()["fields"]
        form = {name: field["default"] for name, field in fields.items() if field["default"] is not None}
        path = f"/api/v1/runs/{visitor.submit('/runs/new.json', data=form | {'prompts': 50}).json()['code']}"

        def run() -> dict[str, Any]:
            state: dict[str, Any] = visitor.ask(path).json()
            return state

        wait_until(lambda: run()["finished"] > 10, 120, "trajectories end")
        worker = processes_of(data, b"celery", b"engine")
        children = [*processes_of(data, b"import engine_process;"), *processes_of(data, b"import storage_process;")]
        assert (len(worker), len(children)) == (1, 2)
        limit(worker, -(64 << 20))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: processes_of(data, b"celery", b"engine") not in ([], worker), 120, "the worker is replaced")
        limit(processes_of(data, b"celery", b"engine"), None)
        wait_until(lambda: run()["status"] in ("done", "failed"), 240, "the run ends")
        items = visitor.ask(path + "/trajectories?limit=200").json()["items"]
        assert (run()["status"], run()["finished"], run()["failed"]) == ("done", 200, 0), run()
        assert sorted(item["index"] for item in items) == list(range(200)), items
