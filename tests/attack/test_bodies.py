"""Hostile pushes (M2, H4): a process beside the web process reads them, under limits, and others are served."""

import http.client
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import Client
from django.urls import reverse

from inspector.api import push_views as push_view
from rollout_inspector.formats import limits
from rollouts.jobs import push_process as pushes
from rollouts.jobs.push_process import PushAnswer
from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from tests.attack.hostile_bodies import BODIES, own_line
from tests.conftest import wait_until
from tests.people import make_member

GOOD = own_line("good", [{"delta_ids": [1], "completion_ids": [2]}])
QUICK = ("empty objects", "deltas", "numbers", "one value in Parquet", "a batch with a large field")
"""Hostile bodies of each family that cost little processor time."""


class Pusher:
    """A trainer with a token and a run."""

    def __init__(self, address: str) -> None:
        user = make_member("ann")
        self.token = create_api_key(user, "trainer")[1]
        self.run = create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE)
        self.address = urlsplit(address)

    def push(self, body: bytes) -> tuple[int, dict[str, Any], str | None]:
        """Status, body and Retry-After of the answer."""
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port, timeout=240)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/x-ndjson"}
        try:
            connection.request("POST", f"/api/runs/{self.run.code}/trajectories", body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers["Retry-After"]
        finally:
            connection.close()


@pytest.fixture
def pusher(push_process: None, live_server: Any, sent: list[int]) -> Pusher:
    return Pusher(live_server.url)


def child_of_this_process() -> int:
    child = pushes._process._child
    assert child is not None
    return child.process.pid


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.django_db(transaction=True)
def test_another_process_reads_hostile_bodies_and_lives(pusher: Pusher) -> None:
    status, said, _ = pusher.push(GOOD)
    assert (status, said["trajectories"]) == (200, 1)
    reader = child_of_this_process()
    bodies = {name: BODIES[name]() for name in QUICK}
    before = resident_megabytes()
    for name, body in bodies.items():
        status, said, _ = pusher.push(body)
        assert status in (200, 413), (name, said)
        sentence = said["error"] if status == 413 else said["rejected"][0]["reason"]
        assert any(letter.isdigit() for letter in sentence) and "/" not in sentence, (name, sentence)
    assert resident_megabytes() - before < 50
    assert child_of_this_process() == reader
    assert Run.objects.get(pk=pusher.run.pk).n_trajectories == 1


@pytest.mark.django_db(transaction=True)
def test_a_push_that_ends_its_process_is_answered_and_the_next_is_read(pusher: Pusher) -> None:
    assert pusher.push(GOOD)[0] == 200
    child = pushes._process._child
    assert child is not None
    found: list[Any] = []
    os.kill(child.process.pid, signal.SIGSTOP)  # it has the body, and is not done before it is killed
    slow = threading.Thread(target=lambda: found.append(pusher.push(BODIES["texts"]())))
    slow.start()
    wait_until(pushes._process._lock.locked, 240, "the body is read")
    child.process.kill()
    slow.join(240)
    status, said, wait = found[0]
    assert (status, wait) == (503, "10") and "Push again" in said["error"]
    assert pusher.push(GOOD)[1]["known"] == 1


@pytest.mark.django_db(transaction=True)
def test_a_push_waits_for_another_a_bounded_time(pusher: Pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "WAIT_SECONDS", 0.1)
    with pushes._process._lock:
        status, said, wait = pusher.push(GOOD)
    assert (status, wait) == (503, "10") and "reads other pushes" in said["error"]
    assert pusher.push(GOOD)[0] == 200


@pytest.mark.django_db(transaction=True)
def test_a_push_that_takes_too_long_is_ended(pusher: Pusher, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pusher.push(GOOD)[0] == 200
    reader = child_of_this_process()
    monkeypatch.setattr(pushes, "ANSWER_SECONDS", 0.0)
    status, said, wait = pusher.push(BODIES["texts"]())
    assert (status, wait) == (503, "10") and "not stored within 0 s" in said["error"]
    wait_until(lambda: not Path(f"/proc/{reader}").exists(), 240, "the process has ended")


def send(client: Client, token: str, run: Run, body: bytes = GOOD) -> Any:
    return client.post(
        reverse("api-trajectories", args=[run.code]), body, content_type="application/x-ndjson",
        headers={"Authorization": f"Bearer {token}"},
    )


@pytest.fixture
def token(db: None) -> str:
    return create_api_key(make_member("bob"), "trainer")[1]


@pytest.fixture
def run(db: None) -> Run:
    return create_run(Run.Kind.IMPORT, "grpo", status=Run.Status.DONE)


def test_pushes_leave_threads_to_pages(client: Client, token: str, run: Run, sent: list[int]) -> None:
    for _ in range(push_view.MAX_PUSHES):
        assert push_view._places.acquire(blocking=False)
    try:
        answer = send(client, token, run)
    finally:
        for _ in range(push_view.MAX_PUSHES):
            push_view._places.release()
    assert (answer.status_code, answer["Retry-After"]) == (503, "10")
    assert "takes 6 pushes at once" in answer.json()["error"]
    assert send(client, token, run).status_code == 200


def test_places_are_given_back_after_every_kind_of_answer(
    client: Client, token: str, run: Run, monkeypatch: pytest.MonkeyPatch, sent: list[int]
) -> None:
    for body in (b"", b"\x80\x04\x95", b"x" * 100):
        assert 400 <= send(client, token, run, body).status_code < 500

    def broken(*asked: Any) -> PushAnswer:  # what is counted is the place; test_full_disk.py fills a disk
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pushes, "ask", broken)
        answer = send(client, token, run)
    assert (answer.status_code, answer["Retry-After"]) == (507, "10")
    assert push_view._places._value == push_view.MAX_PUSHES


def test_a_push_without_memory_is_refused(
    client: Client, token: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:  # in this process, whose memory is not to be filled; BODIES fill the other one's
        raise MemoryError

    monkeypatch.setattr(pushes, "take_push", full)
    answer = send(client, token, run)
    assert answer.status_code == 413 and "more than 2,048 MB of memory" in answer.json()["error"]


def test_a_push_of_lines_that_are_all_rejected_ends_early(
    client: Client, token: str, run: Run, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PUSH", replace(limits.PUSH, rejected=1500))
    body = GOOD + b"{}\n" * 4000
    answer = client.post(
        f"/api/runs/{run.code}/trajectories", body, "application/x-ndjson", headers={"Authorization": f"Bearer {token}"}
    )
    said = answer.json()
    assert answer.status_code == 413 and "1,500 lines were rejected" in said["error"]
    assert said["trajectories"] == 1 and 1500 < said["n_rejected"] < 4000


def test_the_description_of_a_run_holds_few_values(client: Client, token: str) -> None:
    body = b'{"name": "x", "more": [' + b"{}," * 1_000_000 + b"{}]}"
    answer = client.post(
        reverse("api-runs"), body, content_type="application/json", headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 413 and "too many values" in answer.json()["error"]
