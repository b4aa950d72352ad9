"""The recorder between hostile clients and a hostile server: no token, no call; and no answer stops it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rollouts.recorder import wire
from rollouts.recorder.access import token_problem
from rollouts.recorder.choices import join_stream
from rollouts.recorder.writer import Writer
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from tests.attack import hostile_engine as hostile
from tests.attack.hostile_engine import HostileEngine, Say
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


# -- a hostile server behind the recorder ------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
HEADS = {
    "a head of 100 kB": OK + b"X: " + b"a" * 100_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "5,000 lines": OK + b"X: a\r\n" * 5000 + b"Content-Length: 2\r\n\r\n{}",
    "too short": OK + b"Content-Length: 100\r\n\r\n{}",
    "below zero": OK + b"Content-Length: -2\r\n\r\n{}",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "length and pieces": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "wrong pieces": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a bare line break": OK + b"X: b\rY: c\r\nContent-Length: 2\r\n\r\n{}",
    "a zero byte": OK + b"X: b\0c\r\nContent-Length: 2\r\n\r\n{}",
    "a reason in bytes": b"HTTP/1.1 200 \xff\x01\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
    "no answer": b"",
    "no HTTP": b"\0" * 1000,
}


def call(id_list: Any = (3,), **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    return {"prompt_token_ids": [1, 2], "choices": [{**choice, "token_ids": id_list, **more}]}


def chunk(**more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **more}]}


WHOLE = [
    b'{"choices":[{"message":{"content":"\xff\xfe"},"token_ids":[1]}],"prompt_token_ids":[1]}', b'{"a":' * 5000,
    b'{"choices":[{"message":{"content":"\\ud800"},"token_ids":[1]}],"prompt_token_ids":[1]}',
    b'{"choices":[{"message":{},"token_ids":[1e400]}],"prompt_token_ids":[1]}', b'{"choices":' + b"[" * 100_000,
    call([-1, 2**40]), call("abc"), call([[1]]), call({"a": 1}), call([1.5]), call(message="x"), call(message=[1]),
    call(logprobs=5), call(logprobs={"content": 5}), call(logprobs={"content": [{"logprob": "x"}]}),
    call(logprobs={"content": [{"logprob": -1, "top_logprobs": 5}]}), {"choices": 5}, {"choices": [5]}, {},
]  # fmt: skip
STREAMED = [
    {"choices": 5}, {"choices": [None]}, chunk(index=[1]), chunk(delta=5), chunk(logprobs=5),
    chunk(delta={"tool_calls": 5}), chunk(delta={"tool_calls": [{"index": 10**9, "function": {"name": "a"}}]}),
    chunk(delta={"tool_calls": [{"index": 0, "function": {"name": {"a": 1}}}]}), {"object": {"a": 1}},
    b'{"choices":[{"delta":{"content":"\xff"},"token_ids":[1]}],"prompt_token_ids":[1]}',
]  # fmt: skip


def recorded(tmp_path: Path, *say: Say, logprobs: bool = False, **more: Any) -> tuple[list[Any], Writer, Run]:
    """The status and body of each call that is answered so, with a good call behind each; the writer and the run."""
    run, server = create_run(Run.Kind.IMPORT, "recorded", engine="recorder"), HostileEngine(say=list(say))
    headers = {"X-Session-Id": "bad", "Accept-Encoding": "identity"}

    async def scenario(setup: RecorderSetup) -> list[Any]:
        found: list[Any] = []
        for n in range(len(say)):
            url = f"{setup.recorded}/v1/chat/completions"
            async with setup.http.post(url, json={**CHAT, "stream": True, **more}, headers=headers) as answer:
                found.append((answer.status, await answer.read()))
            assert "choices" in await setup.chat("hi", session=f"good-{n}")
        return found

    found, writer = play(run, tmp_path, scenario, server, logprobs)
    return found, writer, run


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_not_http_is_a_502(name: str, tmp_path: Path) -> None:
    """A reason that cannot be written was an error of the recorder."""
    ((status, body),), writer, _ = recorded(tmp_path, hostile.raw(HEADS[name]))
    assert status == 502 and json.loads(body)["error"]["type"] == "recorder"
    assert writer.state()["stored"] == 1


def test_answers_of_any_shape_pass_and_cost_no_other_call(tmp_path: Path) -> None:
    said = [*map(hostile.body, WHOLE), *map(hostile.events, STREAMED)]
    answers, writer, run = recorded(tmp_path, *said)
    assert {status for status, _ in answers} == {200}
    assert writer.state() == {"calls": 2 * len(said), "stored": len(said), "without_ids": 0, "unread": len(said),
                              "rescued": 0, "not_recorded": {}}  # fmt: skip
    assert run.n_trajectories == len(said) and run.status == "done"


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_an_answer_without_an_end_passes_as_it_comes(
    content_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was gathered in memory until its end, and an event without one as well."""
    monkeypatch.setattr(wire, "MAX_KEPT_BYTES", 1 << 20)
    run, server = create_run(Run.Kind.IMPORT, "recorded", engine="recorder"), HostileEngine()
    server.say = [hostile.pieces(content_type, b"[" * (1 << 20), 1 << 30, b"data: {")]

    async def scenario(setup: RecorderSetup) -> int:
        url, n = f"{setup.recorded}/v1/chat/completions", 0
        async with setup.http.post(url, json={**CHAT, "stream": True}, headers={"X-Session-Id": "bad"}) as answer:
            async for piece in answer.content.iter_any():
                n += len(piece)
                if n > 64 << 20:
                    return n
        return n

    n, writer = play(run, tmp_path, scenario, server)
    assert n > 64 << 20 and writer.state()["unread"] == 1 and "larger than" in run.rejections.get().reason


def test_a_stream_of_50_000_events_is_put_together_in_one_pass() -> None:
    """Each event copied all ids and log-probabilities before it: 80,000 took 80 seconds."""
    event = chunk(delta={"content": "ab"}, token_ids=[5], logprobs={"content": [{"logprob": -1.0}]})
    (choice,) = join_stream([json.loads(json.dumps(event)) for _ in range(50_000)], False)["choices"]
    assert choice["message"]["content"] == "ab" * 50_000
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 50_000


def test_packed_bytes_pass_packed(tmp_path: Path) -> None:
    """A bomb is not unpacked on either way. A packed request went on unpacked, under a head that called it packed."""
    bomb = gzip.compress(b"\0" * (16 << 20))
    ((status, body),), writer, _ = recorded(tmp_path, hostile.body(bomb, **{"Content-Encoding": "gzip"}))
    assert (status, len(body), writer.state()["unread"]) == (200, 16 << 20, 1)  # the client unpacks it
    run, server = create_run(Run.Kind.IMPORT, "recorded", engine="recorder"), FakeServer()
    packed = gzip.compress(b" " * (1 << 20))

    async def scenario(setup: RecorderSetup) -> None:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            await setup.http.post(setup.recorded + path, data=packed, headers=headers)

    play(run, tmp_path, scenario, server)
    assert [len(body) for _, _, body in server.seen] == [1 << 20] * 2  # the server unpacks it


def test_a_call_that_breaks_the_reader_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that stores all calls would end, and each request wait for room."""
    real = wire.recorded_lines

    def broken(dialect: Any, session: str, request: bytes, answer: Any, *more: Any) -> bytes:
        if isinstance(answer, list) and b"break" in answer[0]:
            raise MemoryError
        return real(dialect, session, request, answer, *more)

    monkeypatch.setattr(wire, "recorded_lines", broken)
    _, writer, run = recorded(tmp_path, hostile.events(chunk(delta={"content": "break"})))
    assert writer.state()["stored"] == 1 and "MemoryError" in run.rejections.get().reason
