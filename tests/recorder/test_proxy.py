"""The recorder before a fake server: what the client sees, what the server is asked, what is stored."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from django.db import OperationalError
from yarl import URL

from rollout_inspector import formats
from rollouts.recorder import proxy, wire, writer
from rollouts.recorder.proxy import Room
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.runs.runs import cancel_run
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.recorder.harness import FakeServer, RecorderSetup, Scenario, encode, play

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def record(run: Run, tmp_path: Path) -> Callable[..., Any]:
    """Play a scenario against a recorder; gives what the scenario gives."""
    return lambda scenario, **options: play(run, tmp_path, scenario, **options)[0]


async def episode(setup: RecorderSetup, session: str | None, question: str = "hi", **more: Any) -> None:
    first = await setup.chat(question, session=session, **more)
    said = first["choices"][0]["message"]["content"]
    await setup.chat(question, said, "and?", session=session, **more)


class TestWhatIsStored:
    def test_each_call_is_a_step_of_its_session(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await asyncio.gather(*(episode(setup, f"s{n}", f"q{n}") for n in range(5)))

        record(scenario)
        assert (run.status, run.n_trajectories, run.n_finished, run.n_steps, run.n_rows) == ("done", 5, 5, 10, 5)
        stored = run.trajectories.get(external_id="s3")
        assert stored.status == StoredTrajectory.Status.DONE and stored.n_rows == 1
        value = load_trajectory(stored)
        assert value.steps[0].prompt_ids.tolist() == encode([{"role": "user", "content": "q3"}])
        assert value.steps[0].request is not None and value.steps[0].engine == "vllm 0.0"
        assert value.steps[1].prompt_ids.tolist()[: len(value.steps[0].stream)] == value.steps[0].stream.tolist()
        assert value.steps[0].completion_ids.size != 0 and value.steps[0].logprobs is None
        assert run.n_tokens == sum(one.n_tokens for one in run.trajectories.all())
        assert run.n_sampled == sum(one.n_sampled for one in run.trajectories.all())

    def test_a_stream_and_a_whole_answer_leave_the_same_step(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await setup.chat("hi", session="whole")
            headers = {"X-Session-Id": "stream"}
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.read()

        record(scenario, logprobs=True)
        whole, stream = (
            load_trajectory(run.trajectories.get(external_id=n)).steps for n in ("whole", "stream")
        )
        assert whole[0].stream.tolist() == stream[0].stream.tolist()
        assert whole[0].logprobs is not None and stream[0].logprobs is not None
        assert whole[0].logprobs.tolist() and len(stream[0].logprobs) == len(stream[0].completion_ids)
        assert whole[0].reply["content"] == stream[0].reply["content"]  # type: ignore[index]
        assert (stream[0].finish_reason, stream[0].request is not None) == ("stop", True)

    def test_a_session_by_the_path(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await episode(setup, None, base=f"{setup.recorded}/session/my%20agent")

        record(scenario)
        assert list(run.trajectories.values_list("external_id", "n_steps")) == [("my agent", 2)]

    def test_unnamed_calls_follow_their_conversation(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            # A group of one prompt over shared connections: told apart by nothing but what they quote.
            await asyncio.gather(*(episode(setup, None, "same") for _ in range(3)))
            await setup.chat("another")

        record(scenario)
        assert sorted(run.trajectories.values_list("n_steps", flat=True)) == [1, 2, 2, 2]

    def test_text_completions_follow_their_stream(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            url = f"{setup.recorded}/v1/completions"
            async with setup.http.post(url, json={"model": "m", "prompt": [5, 6]}) as answer:
                assert (await answer.json())["choices"][0]["token_ids"] is None
            text = [100 + ord(letter) % 1000 for letter in "text"]
            for prompt in ([5, 6, *text, 9, 7], [5, 6, 8]):
                async with setup.http.post(url, json={"model": "m", "prompt": prompt}) as answer:
                    await answer.read()

        record(scenario)
        assert sorted(run.trajectories.values_list("n_steps", flat=True)) == [1, 2]
        first = load_trajectory(run.trajectories.get(n_steps=2))
        assert first.steps[0].prompt_ids.tolist() == [5, 6] and first.steps[0].text == "text"

    def test_the_harness_may_say_how_it_ended(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> list[int]:
            await episode(setup, "s")
            statuses = []
            for body in (
                b'{"reward": 0.5, "stop_reason": "answered"}',
                b'{"reward": "x"}',
                b"[]",
                b"{",
                b'{"reward": 1e999}',
                b'{"reward": 1e300}',
                b'{"reward": NaN}',
            ):
                async with setup.http.post(f"{setup.recorded}/recorder/sessions/s", data=body) as answer:
                    statuses.append(answer.status)
            return statuses

        assert record(scenario) == [200, 400, 400, 400, 400, 400, 400]
        stored = run.trajectories.get()
        assert (stored.reward, stored.stop_reason, stored.status) == (0.5, "answered", "done")
        assert (stored.run.n_rewards, stored.run.reward_sum) == (1, 0.5)

    def test_the_end_of_a_session_that_had_no_call_is_said(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await setup.chat("hi", session="s")
            await (await setup.http.post(f"{setup.recorded}/recorder/sessions/sess", data=b'{"reward": 1.0}')).read()

        record(scenario)
        assert run.n_trajectories == run.n_rejected == 1 and "'sess'" in run.rejections.get().reason

    def test_a_settled_trajectory_goes_on(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await setup.chat("hi", session="s")
            for _ in range(1200):
                await asyncio.sleep(0.05)
                if await asyncio.to_thread(lambda: run.trajectories.filter(status="done").exists()):
                    break
            await setup.chat("hi", "turn 0", "on", session="s")

        record(scenario, idle_s=0.1)
        assert (run.n_trajectories, run.n_finished, run.n_steps, run.n_rows) == (1, 1, 2, 1)

    def test_a_run_is_gone_on_with(self, run: Run, record: Any) -> None:
        async def first(setup: RecorderSetup) -> None:
            await setup.chat("hi", session="s")

        async def second(setup: RecorderSetup) -> None:
            await setup.chat("hi", "turn 0", "on", session="s")

        record(first)
        record(second)
        assert (run.n_trajectories, run.n_finished, run.n_steps, run.n_rows) == (1, 1, 2, 1)

    def test_line_breaks_in_bodies(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            body = json.dumps({"messages": [{"role": "user", "content": "a\nb"}]}, indent=3)
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", data=body) as answer:
                await answer.read()

        record(scenario, server=FakeServer(pretty=True))
        assert run.n_steps == 1 and run.n_rejected == 0


class TestWhatTheClientSees:
    @pytest.mark.parametrize("logprobs", [False, True])
    @pytest.mark.parametrize(
        "asked",
        [
            {}, {"return_token_ids": True}, {"return_token_ids": False}, {"logprobs": True},
            {"return_token_ids": True, "logprobs": True},
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_the_same_as_without_the_recorder(self, record: Any, asked: Any, stream: bool, logprobs: bool) -> None:
        async def scenario(setup: RecorderSetup) -> list[Any]:
            seen = []
            for base in (setup.direct, setup.recorded):
                body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **asked}
                async with setup.http.post(f"{base}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    parts = [part.removeprefix("data: ") for part in text.split("\n\n")] if stream else [text]
                    values = [json.loads(part) for part in parts if part.startswith("{")]
                    seen.append(
                        (answer.status, answer.content_type, answer.headers.get("X-Kept"), values, parts[-2:] * stream)
                    )
            return seen

        direct, recorded = record(scenario, logprobs=logprobs)
        if stream and not asked.get("return_token_ids"):
            # Without ids a server may cut its pieces elsewhere; what they add up to is the same.
            joined = [
                "".join(value["choices"][0]["delta"].get("content", "") for value in one[3])
                for one in (direct, recorded)
            ]
            assert joined[0] == joined[1] and direct[4] == recorded[4]
            for value in recorded[3]:
                assert value.get("prompt_token_ids") is None and value["choices"][0].get("token_ids") is None
                assert any(value["choices"][0][name] for name in ("delta", "finish_reason", "logprobs"))
                assert (value["choices"][0]["logprobs"] is None) or asked.get("logprobs")
        else:
            assert direct == recorded

    def test_numbers_keep_their_bytes(self, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> bytes:
            body = b'{"messages": [{"role": "user", "content": "\\u00e9"}], "top_p": 1.00, "n":12345678901234567890}'
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", data=body) as answer:
                await answer.read()
            return setup.server.seen[-1][2]

        sent = record(scenario)
        assert b'"top_p":1.00' in sent and b"12345678901234567890" in sent and b"\\u00e9" in sent
        assert b'"return_token_ids":true' in sent

    def test_errors_pass_as_they_are_and_are_not_recorded(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json={"messages": []}) as answer:
                return answer.status, await answer.read()

        assert record(scenario, server=FakeServer(status=429)) == (429, b'{"error":  "as it is"}')
        assert run.n_trajectories == 0 and run.n_rejected == 0

    def test_a_body_that_is_no_object_passes_as_it_is(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            for body in (b"[1]", b"{", b"\xff", b"[" * 100_000):
                async with setup.http.post(f"{setup.recorded}/v1/chat/completions", data=body) as answer:
                    await answer.read()
            return [body for _, _, body in setup.server.seen]

        assert record(scenario, server=FakeServer(status=400)) == [b"[1]", b"{", b"\xff", b"[" * 100_000]

    def test_everything_else_passes_untouched(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            url = URL(f"{setup.recorded}/v1/embeddings?a=%2Fb&c", encoded=True)
            async with setup.http.put(url, data=b"\x01\x02", headers={"Authorization": "Bearer k"}) as answer:
                return answer.status, answer.headers.get("X-Kept"), answer.headers.get("X-Gone"), await answer.read()

        server = FakeServer()
        assert record(scenario, server=server) == (207, "yes", None, b"\x00\xffraw \x01\x02")
        path, headers, _ = server.seen[0]
        assert path == "/v1/embeddings?a=%2Fb&c" and headers["Authorization"] == "Bearer k"
        assert run.n_trajectories == 0

    @pytest.mark.parametrize(
        "path",
        ["/", "/metrics", "/v1/../sleep", "/v1/%2e%2e/sleep", "/session/x/reset", "/session/x", "/healthevil",
         "/versionXYZ", "/health/x", "/v1/..%5cadmin"],
    )
    def test_other_addresses_are_not_reached(self, record: Any, path: str) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            async with setup.http.get(URL(setup.recorded + path, encoded=True)) as answer:
                return answer.status, (await answer.json())["error"]["message"]

        server = FakeServer()
        status, sentence = record(scenario, server=server)
        assert status == 404 and "and nothing else" in sentence and server.seen == []

    @pytest.mark.parametrize(
        ("headers", "said"),
        [
            ({"Origin": "http://evil.example"}, "web page http://evil.example"),
            ({"Origin": "null"}, "web page null"),
            ({"Host": "evil.example"}, "not as evil.example"),
            ({"Host": "127.0.0.1.evil.example:1"}, "not as 127.0.0.1.evil.example:1"),
            ({"Host": "[::1"}, "not as [::1"),
        ],
    )
    @pytest.mark.parametrize("path", ["/recorder/sessions/victim", "/v1/chat/completions"])
    def test_a_foreign_web_page_is_refused(
        self, run: Run, record: Any, headers: dict[str, str], said: str, path: str
    ) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            async with setup.http.post(setup.recorded + path, data=b'{"reward": 99}', headers=headers) as answer:
                return answer.status, (await answer.json())["error"]["message"]

        server = FakeServer()
        status, sentence = record(scenario, server=server)
        assert status == 403 and said in sentence and server.seen == [] and run.n_trajectories == 0

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7000", "[::1]:7000", "LOCALHOST:1"])
    def test_a_client_of_this_machine_is_not_refused(self, record: Any, host: str) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            headers = {"Host": host, "Origin": f"http://{host}"}
            async with setup.http.get(f"{setup.recorded}/health", headers=headers) as answer:
                return answer.status

        assert record(scenario) == 207

    def test_a_server_that_is_not_there(self, run: Run, tmp_path: Path) -> None:
        async def scenario(setup: RecorderSetup) -> Any:
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json={"messages": []}) as answer:
                return answer.status, (await answer.json())["error"]["message"]

        class Gone(FakeServer):
            async def answer(self, request: Any) -> Any:
                request.transport.close()

        (status, sentence), _ = play(run, tmp_path, scenario, Gone())
        assert status == 502 and "does not answer" in sentence and run.n_trajectories == 0


class TestWhatGoesWrong:
    def test_no_ids_are_reported_on_the_run(self, run: Run, record: Any) -> None:
        record(lambda setup: setup.chat("hi", session="s"), server=FakeServer(gives_ids=False))
        assert "1 of 1 recorded calls" in run.error and "without token ids" in run.error and run.status == "done"
        assert run.n_steps == 1

    def test_the_report_counts_the_calls_that_came_after(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            await setup.chat("hi", session="s")
            server.gives_ids = True
            for n in range(3):
                await setup.chat(f"q{n}", session=f"s{n}")

        server = FakeServer(gives_ids=False)
        record(scenario, server=server)
        assert "1 of 4 recorded calls" in run.error

    def test_ids_are_no_report(self, run: Run, record: Any) -> None:
        record(lambda setup: setup.chat("hi", session="s"))
        assert run.error == ""

    def test_a_stream_that_breaks_off_is_kept_as_far_as_it_came(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            with pytest.raises(aiohttp.ClientError):
                await stream(setup)

        record(scenario, server=FakeServer(break_off_after=4))
        (step,) = load_trajectory(run.trajectories.get()).steps
        assert step.completion_ids.size == 3 and step.finish_reason == "abort"

    def test_a_client_that_leaves_stops_the_server_and_what_came_is_kept(self, run: Run, record: Any) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            headers = {"X-Session-Id": "s"}
            async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.content.readuntil(b"\n\n")
                await answer.content.readuntil(b"\n\n")
                answer.close()
            for _ in range(1200):
                await asyncio.sleep(0.05)
                if setup.writer.counts["stored"]:
                    return
            raise AssertionError("the server was not let go")

        record(scenario, server=FakeServer(hang=True))
        (step,) = load_trajectory(run.trajectories.get()).steps
        assert 0 < step.completion_ids.size < 7 and step.finish_reason == "abort"

    def test_nonsense_is_passed_and_rejected_with_a_sentence(self, run: Run, record: Any) -> None:
        class Odd(FakeServer):
            async def answer(self, request: Any) -> Any:
                from aiohttp import web

                body = await request.json()
                return web.Response(body=body["say"].encode(), content_type=body.get("type", "application/json"))

        said = [
            "<html>",
            '{"choices": 3}',
            '{"choices": [{"token_ids": [-1]}]}',
            '{"choices": [{"token_ids": "x"}]}',
            "[1]",
        ]
        events = ['data: {"choices": [{"delta": {"tool_calls": [{"index": 5000}]}}]}\n\n', 'data: {"choices": 3}\n\n']

        async def scenario(setup: RecorderSetup) -> None:
            for say, kind in [*((s, "application/json") for s in said), *((e, "text/event-stream") for e in events)]:
                body = {"messages": [{"role": "user", "content": "x"}], "say": say, "type": kind}
                async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json=body) as answer:
                    text = (await answer.text()).replace(" ", "")
                    # What looks like ids is taken out whatever it holds.
                    masked = say.replace("[-1]", "null").replace('"x"', "null")
                    assert answer.status == 200 and text in (say.replace(" ", ""), masked.replace(" ", ""))

        record(scenario, server=Odd())
        assert run.n_trajectories == 0 and run.n_rejected == run.rejections.count() == len(said) + len(events)
        assert all(one.reason.startswith("A call could not be recorded") for one in run.rejections.all())

    def test_a_huge_answer_passes_and_is_reported(self, run: Run, record: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(wire, "MAX_KEPT_BYTES", 50)
        assert record(lambda setup: setup.chat("hi"))["choices"]
        assert run.n_trajectories == 0 and "larger than" in run.rejections.get().reason

    def test_a_busy_database_is_tried_again(self, run: Run, record: Any, monkeypatch: Any) -> None:
        real, failures = writer.append_steps, []

        def flaky(*args: Any) -> Any:
            if len(failures) < 2:
                failures.append(1)
                raise OperationalError("database is locked")
            return real(*args)

        monkeypatch.setattr(writer, "append_steps", flaky)
        monkeypatch.setattr(writer, "FIRST_WAIT_SECONDS", 0.01)
        record(lambda setup: episode(setup, "s"))
        assert len(failures) == 2 and run.n_steps == 2

    def test_a_lost_database_loses_no_call(self, run: Run, tmp_path: Path, monkeypatch: Any) -> None:
        def lost(*_: Any) -> Any:
            raise OperationalError("no database")

        monkeypatch.setattr(writer, "append_steps", lost)
        monkeypatch.setattr(writer, "FIRST_WAIT_SECONDS", 0.01)
        monkeypatch.setattr(writer, "AT_END_SECONDS", 0.05)
        _, used = play(run, tmp_path, lambda setup: episode(setup, "s"))
        assert used.state()["rescued"] == 2 and run.n_steps == 0
        _, items = formats.read(formats.Source.of_path(used.rescue_file))
        (value,) = list(items)
        assert not isinstance(value, formats.Rejected) and len(value.steps) == 2 and value.external_id == "s"

    def test_more_calls_than_there_is_room_wait_and_are_stored(self, run: Run, record: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(proxy, "MAX_CALLS", 2)

        async def scenario(setup: RecorderSetup) -> None:
            await asyncio.gather(*(setup.chat("hi", session=f"s{n}") for n in range(40)))

        record(scenario)
        assert run.n_trajectories == 40

    @pytest.mark.parametrize("broken", [False, True])
    def test_more_bytes_than_there_is_room_wait_and_are_stored(
        self, broken: bool, run: Run, record: Any, monkeypatch: Any
    ) -> None:
        """Each request is larger than the room: it passes alone. What breaks off gives its room back."""
        monkeypatch.setattr(proxy, "MAX_BYTES", 1000)
        most, take = [], Room.take

        async def watched(self: Room, n_bytes: int) -> None:
            await take(self, n_bytes)
            most.append((self.n_calls, self.n_bytes - n_bytes))

        monkeypatch.setattr(Room, "take", watched)

        async def scenario(setup: RecorderSetup) -> None:
            if broken:
                head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900000\r\n\r\n{"
                _, writer = await asyncio.open_connection("127.0.0.1", int(setup.recorded.rpartition(":")[2]))
                writer.write(head)
                await writer.drain()
                await asyncio.sleep(0.1)
                writer.close()
            await asyncio.gather(*(setup.chat("hi" * 2000, session=f"s{n}") for n in range(20)))

        record(scenario)
        assert run.n_trajectories == 20 and set(most) == {(1, 0)}

    def test_a_client_that_does_not_go_on_is_cut_off(self, run: Run, record: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(proxy, "IDLE_SECONDS", 0.3)
        monkeypatch.setattr(proxy, "BODY_SECONDS", 0.3)
        start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"

        async def scenario(setup: RecorderSetup) -> list[bytes]:
            answers = []
            for sent in (b"", start, start + b"Content-Length: 90\r\n\r\n{"):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(setup.recorded.rpartition(":")[2]))
                writer.write(sent)
                answers.append(await asyncio.wait_for(reader.read(100), 30))
                writer.close()
            return answers

        silent, half, body = record(scenario)
        assert silent == half == b"" and body.startswith(b"HTTP/1.1 408")

    def test_cancelling_the_run_stops_the_recording_alone(self, run: Run, record: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(writer, "BEAT_SECONDS", 0.05)

        async def scenario(setup: RecorderSetup) -> Any:
            await setup.chat("hi", session="before")
            await asyncio.to_thread(cancel_run, run)
            assert await asyncio.to_thread(setup.writer.cancelled.wait, 240)
            return await setup.chat("hi", session="after")

        assert record(scenario)["choices"]
        assert run.status == "cancelled" and list(run.trajectories.values_list("external_id", flat=True)) == ["before"]

    def test_odd_session_names(self, run: Run, record: Any) -> None:
        names = ["a" * 500, "a" * 500 + "b", "é/%00", " x "]

        async def scenario(setup: RecorderSetup) -> None:
            for name in names:
                await setup.chat("hi", session=name)

        record(scenario)
        found = list(run.trajectories.order_by("index").values_list("external_id", flat=True))
        assert len(set(found)) == 4 and found[3] == "x" and all(len(name) <= 200 for name in found)


async def stream(setup: RecorderSetup) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with setup.http.post(f"{setup.recorded}/v1/chat/completions", json=body) as answer:
        return await answer.read()


def test_queries_of_a_batch_do_not_grow_with_it(run: Run, django_assert_max_num_queries: Any) -> None:
    from rollout_inspector.streams.trajectory import Step, ids_array
    from rollouts.store.trajectories.recorded_trajectories import append_steps

    for n in (2, 30):
        calls = {f"{n}-{i}": [Step(ids_array([1, 2]), ids_array([i]))] for i in range(n)}
        with django_assert_max_num_queries(60 if n == 2 else 60 + 2 * n):
            append_steps(run, calls)


__all__ = ["Scenario"]
