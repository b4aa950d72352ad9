"""The recorder's token: who does not name it reaches nothing, and the server behind never sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.recorder.access import token_problem
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from tests.recorder.harness import FakeServer, RecorderSetup, play

pytestmark = pytest.mark.django_db(transaction=True)

TOKEN = "Zk3-a_long_token_of_letters"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def answers(tmp_path: Path, calls: list[tuple[str, str, dict[str, str]]]) -> tuple[list[int], FakeServer, Run]:
    """The status of each call (method, path, headers), what reached the server, and the run."""
    run, server = create_run(Run.Kind.IMPORT, "recorded", engine="recorder"), FakeServer()

    async def scenario(setup: RecorderSetup) -> list[int]:
        found = []
        for method, path, headers in calls:
            async with setup.http.request(method, setup.recorded + path, json=CHAT, headers=headers) as answer:
                body = await answer.text()
                found.append(answer.status)
                assert answer.status != 401 or ("X-Recorder-Token" in body and TOKEN not in body)
        return found

    statuses, _ = play(run, tmp_path, scenario, server, token=TOKEN)
    return statuses, server, run


def test_without_the_token_nothing_is_reached(tmp_path: Path) -> None:
    wrong: list[tuple[str, dict[str, str]]] = [
        ("", {}), ("", {"X-Recorder-Token": TOKEN[:-1]}), ("", {"X-Recorder-Token": f"{TOKEN}x"}),
        ("", {"Authorization": f"Bearer {TOKEN}"}), ("/token/wrong", {}), ("/token/", {}), (f"/TOKEN/{TOKEN}", {}),
        (f"/token/{TOKEN}", {"X-Recorder-Token": "wrong"}), ("", {"X-Recorder-Token": "\udcff\udcfe".encode(
            "utf-8", "surrogateescape").decode("latin-1")}), (f"/token/{TOKEN.upper()}", {}),
    ]
    places = [
        ("POST", "/v1/chat/completions"),
        ("GET", "/health"),
        ("GET", "/recorder"),
        ("POST", "/recorder/sessions/a"),
    ]
    calls = [(method, before + path, headers) for before, headers in wrong for method, path in places]
    statuses, server, run = answers(tmp_path, calls)
    assert set(statuses) <= {401, 404} and statuses.count(401) >= 36 and server.seen == []
    assert run.n_trajectories == 0


def test_both_ways_to_name_the_token_pass_and_the_server_never_sees_it(tmp_path: Path) -> None:
    calls: list[tuple[str, str, dict[str, str]]] = [
        (
            "POST",
            "/v1/chat/completions",
            {"X-Recorder-Token": TOKEN, "X-Session-Id": "a", "Authorization": "Bearer key"},
        ),
        ("POST", f"/token/{TOKEN}/v1/chat/completions", {"X-Session-Id": "b"}),
        ("POST", f"/token/{TOKEN}/session/c/v1/chat/completions", {}),
        ("GET", f"/token/{TOKEN}/recorder", {}),
        ("POST", f"/token/{TOKEN}/recorder/sessions/c", {}),
    ]
    statuses, server, run = answers(tmp_path, calls)
    assert statuses == [200, 200, 200, 200, 200]
    assert sorted(run.trajectories.values_list("external_id", flat=True)) == ["a", "b", "c"]
    assert len(server.seen) == 3 and TOKEN not in repr(server.seen)
    assert any(headers.get("Authorization") == "Bearer key" for _, headers, _ in server.seen)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "recorder.example", "127.0.0.1.evil.example", ""])
def test_without_a_token_it_listens_on_this_machine_alone(host: str) -> None:
    assert "INSPECTOR_RECORDER_TOKEN" in token_problem("", host) and token_problem(TOKEN, host) == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_this_machine_needs_no_token(host: str) -> None:
    assert token_problem("", host) == ""
