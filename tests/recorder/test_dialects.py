"""The dialects that the recorder knows: what it asks for, what the client sees, what is stored."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_inspector.diagnose import examine
from rollouts.recorder import wire, writer
from rollouts.recorder.sessions import Caller, SessionNames, session_of_key
from rollouts.recorder.wire import DIALECTS
from rollouts.store.models import Run
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.recorder.harness import FakeServer, RecorderSetup, play

PROMPT, SAMPLED = [5, 6, 7], [8, 9]
RAW = {"type": "raw_message_tokens", "message": ""}
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}


@dataclass
class Scripted(FakeServer):
    """Answers each address with what the script holds for it; a list is a stream of events."""

    script: dict[str, Any] = field(default_factory=dict)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.scripted)
        return app

    async def scripted(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.raw_path, dict(request.headers), await request.read()))
        answer = self.script.get(request.path)
        if isinstance(answer, Callable):  # type: ignore[arg-type]
            answer = answer(json.loads(self.seen[-1][2]))
        if not isinstance(answer, list) or not answer or not {"type", "choices"} & answer[0].keys():
            return web.json_response(answer, status=200 if answer is not None else 404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in answer:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        await response.write_eof()
        return response


pytestmark = pytest.mark.django_db(transaction=True)


def recorded(run: Run, folder: Path, path: str, request: Any, answer: Any, **options: Any) -> tuple[str, Any, Any, Any]:
    """One call of an address: what the client saw, what the server was asked, the trajectory and the writer."""

    async def scenario(setup: RecorderSetup) -> str:
        async with setup.http.post(setup.recorded + path, json=request, headers={"X-Session-Id": "s"}) as said:
            assert said.status == 200
            return await said.text()

    server = Scripted(script={path: answer})
    text, writer = play(run, folder, scenario, server, **options)
    return text, json.loads(server.seen[0][2]), load_trajectory(run.trajectories.get()), writer


def responses_answer(request: Any) -> dict[str, Any]:
    raw = request.get("enable_response_messages")
    return {
        "id": "resp_1", "object": "response", "status": "completed", "output": [MESSAGE],
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
        "input_messages": [{**RAW, "tokens": PROMPT}] if raw else None,
        "output_messages": [{**RAW, "tokens": SAMPLED}] if raw else None,
    }


class TestResponses:
    REQUEST = {"model": "m", "instructions": "be kind", "input": "hello", "temperature": 0.5}

    def test_ids_are_asked_for_and_hidden_again(self, run: Run, tmp_path: Path) -> None:
        text, asked, value, writer = recorded(run, tmp_path, "/v1/responses", self.REQUEST, responses_answer)
        assert asked["enable_response_messages"] is True
        assert json.loads(text) == responses_answer({})
        (step,) = value.steps
        assert step.stream.tolist() == PROMPT + SAMPLED and step.temperature == 0.5 and step.finish_reason == "stop"
        assert list(step.request.messages) == [
            {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
        ]
        assert step.reply == {"role": "assistant", "content": "hi"}
        assert writer.state()["without_ids"] == 0 and run.error == ""

    def test_a_client_that_asks_for_them_sees_them(self, run: Run, tmp_path: Path) -> None:
        asks = {**self.REQUEST, "enable_response_messages": True}
        text, _, _, _ = recorded(run, tmp_path, "/v1/responses", asks, responses_answer)
        assert json.loads(text) == responses_answer(asks)

    def test_a_stream_ends_with_the_ids(self, run: Run, tmp_path: Path) -> None:
        def events(request: Any) -> list[Any]:
            return [
                *({"type": "response.output_text.delta", "delta": letter} for letter in "hi"),
                {"type": "response.completed", "response": responses_answer(request)},
            ]

        text, _, value, _ = recorded(run, tmp_path, "/v1/responses", {**self.REQUEST, "stream": True}, events)
        (step,) = value.steps
        assert step.stream.tolist() == PROMPT + SAMPLED
        seen = [json.loads(wire.payload(one.encode()) or b"") for one in text.split("\n\n")[:-1]]
        assert seen == events({}) and text.startswith("event: response.output_text.delta\n")

    def test_tools_that_the_server_runs_are_calls_of_their_own(self, run: Run, tmp_path: Path) -> None:
        def answer(request: Any) -> dict[str, Any]:
            streams = [SAMPLED, [5, 6, 7, 8, 9, 10], [11]]
            return {**responses_answer(request), "output_messages": [{**RAW, "tokens": one} for one in streams]}

        _, _, value, _ = recorded(run, tmp_path, "/v1/responses", self.REQUEST, answer)
        assert [step.stream.tolist() for step in value.steps] == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11]]
        assert value.steps[0].finish_reason == "tool_calls" and run.n_rows == 1

    def test_items_of_a_turn_are_one_message(self) -> None:
        call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"}
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}, call,
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
        ]
        tools = [{"type": "function", "name": "add", "parameters": {}}, {"type": "web_search"}]
        request = {"input": items, "tools": tools}
        calls = DIALECTS["/v1/responses"].calls
        assert calls is not None
        ((asked, _),) = calls(request, {"output": []})
        function = {"name": "add", "arguments": "{}"}
        assert asked["messages"] == [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]},
        ]
        assert asked["tools"] == [{"type": "function", "function": {"name": "add", "parameters": {}}}, tools[1]]

    def test_a_call_goes_on_from_the_answer_that_it_names(self, run: Run, tmp_path: Path) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            for more in ({"input": "a"}, {"input": "b", "previous_response_id": "resp_1"}, {"input": "c"}):
                async with setup.http.post(f"{setup.recorded}/v1/responses", json={"model": "m", **more}) as answer:
                    await answer.read()

        play(run, tmp_path, scenario, Scripted(script={"/v1/responses": responses_answer}))
        assert sorted(run.trajectories.values_list("n_steps", flat=True)) == [1, 2]


class TestTokensIn:
    @pytest.mark.parametrize("stream", [False, True])
    def test_vllm(self, run: Run, tmp_path: Path, stream: bool) -> None:
        def answer(request: Any) -> Any:
            logprobs = request["sampling_params"].get("logprobs")
            entries = [{"token_id": one, "logprob": -0.5} for one in SAMPLED]
            choice = {"index": 0, "token_ids": SAMPLED, "finish_reason": "stop",
                      "logprobs": None if logprobs is None else {"content": entries}}
            whole = {"prompt_token_ids": PROMPT if request.get("return_token_ids") else None, "choices": [choice]}
            return [whole] if stream else whole

        request = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.7, "max_tokens": 2}, "stream": stream}
        text, asked, value, _ = recorded(run, tmp_path, "/inference/v1/generate", request, answer, logprobs=True)
        assert asked["sampling_params"] == {"temperature": 0.7, "max_tokens": 2, "logprobs": 0}
        (step,) = value.steps
        assert step.stream.tolist() == PROMPT + SAMPLED and step.temperature == 0.7
        assert step.logprobs is not None and step.logprobs.tolist() == [-0.5, -0.5]
        seen = json.loads(text.removeprefix("data: "))
        assert seen == (answer(request)[0] if stream else answer(request))

    @pytest.mark.parametrize("shape", ["whole", "list", "cumulative", "new pieces"])
    def test_sglang(self, run: Run, tmp_path: Path, shape: str) -> None:
        meta = {"finish_reason": {"type": "stop", "matched": 9}, "weight_version": "v3", "completion_tokens": 2}
        whole = {"text": "hi", "output_ids": SAMPLED, "meta_info": meta}
        first = {"type": "x", "text": "h", "output_ids": [8], "meta_info": {"completion_tokens": 1}}
        answers = {
            "whole": whole, "list": [whole, {**whole, "index": 1}], "cumulative": [first, {**whole, "type": "x"}],
            "new pieces": [first, {**whole, "type": "x", "text": "i", "output_ids": [9]}],
        }
        request = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.7}}
        text, asked, value, _ = recorded(run, tmp_path, "/generate", request, answers[shape])
        assert asked == request and "weight_version" in text
        assert [step.stream.tolist() for step in value.steps] == [PROMPT + SAMPLED] * (2 if shape == "list" else 1)
        step = value.steps[0]
        assert (step.text, step.finish_reason, step.stop_reason, step.temperature) == ("hi", "stop", "9", 0.7)
        assert step.policy_version == "v3"


class TestMessages:
    REQUEST = {
        "model": "m", "max_tokens": 9, "system": [{"type": "text", "text": "be kind"}],
        "messages": [
            {"role": "user", "content": "add"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "5"}]},
                {"type": "text", "text": "go on"},
            ]},
        ],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    ANSWER = {
        "id": "msg", "type": "message", "role": "assistant", "stop_reason": "tool_use", "stop_sequence": None,
        "content": [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "d", "name": "add", "input": {"a": 2}}],
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }

    def test_a_call_is_kept_as_text_and_the_run_says_why(self, run: Run, tmp_path: Path) -> None:
        text, asked, value, writer = recorded(run, tmp_path, "/v1/messages", self.REQUEST, self.ANSWER)
        assert json.loads(text) == self.ANSWER and asked == self.REQUEST
        (step,) = value.steps
        assert [message["role"] for message in step.request.messages] == ["system", "user", "assistant", "tool", "user"]
        assert step.request.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert step.request.messages[3] == {"role": "tool", "tool_call_id": "c", "content": "5"}
        assert step.request.tools[0]["function"] == {"name": "add", "parameters": {"type": "object"}}
        assert step.reply["content"] == "so" and step.finish_reason == "tool_calls"
        assert step.reply["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
        assert writer.state()["without_ids"] == 1
        assert "1 of 1 recorded calls are of the dialect Messages" in run.error and "without token ids" not in run.error

    def test_a_stream_adds_up_to_the_same(self, run: Run, tmp_path: Path) -> None:
        start = {**self.ANSWER, "content": [], "stop_reason": None}
        blocks = self.ANSWER["content"]
        events = [
            {"type": "message_start", "message": start}, {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "s"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "o"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": {**blocks[1], "input": {}}},
            {"type": "content_block_delta", "index": 1,
             "delta": {"type": "input_json_delta", "partial_json": '{"a": 2}'}},
            {"type": "content_block_stop", "index": 1},
            {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ]
        request = {**self.REQUEST, "stream": True}
        _, _, value, _ = recorded(run, tmp_path, "/v1/messages", request, events)
        dialect = DIALECTS["/v1/messages"]
        assert dialect.calls is not None
        ((_, whole),) = dialect.calls(dict(self.REQUEST), dict(self.ANSWER))
        assert value.steps[0].reply == whole["choices"][0]["message"]
        assert value.steps[0].finish_reason == "tool_calls"


def test_other_addresses_are_counted_and_named(run: Run, tmp_path: Path) -> None:
    script = {path: {} for path in ("/v1/embeddings", "/v1/rerank", "/tokenize", "/v1/messages/count_tokens")}

    async def scenario(setup: RecorderSetup) -> Any:
        for path in ("/v1/embeddings", *script, "/v1/no"):
            async with setup.http.post(setup.recorded + path, json={}) as answer:
                await answer.read()
        async with setup.http.get(f"{setup.recorded}/recorder") as answer:
            return await answer.json()

    state, _ = play(run, tmp_path, scenario, Scripted(script=script))
    assert state["not_recorded"] == {"/v1/embeddings": 2, "/v1/rerank": 1} and state["calls"] == 0
    assert run.error == "Calls of these addresses passed and are not recorded: v1/embeddings (2), v1/rerank (1)."


def test_addresses_that_clients_make_up_are_counted_together(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(writer, "MAX_MISSED", 2)

    async def scenario(setup: RecorderSetup) -> None:
        for path in script:
            await (await setup.http.post(setup.recorded + path, json={})).read()

    script = {f"/v1/{n}": {} for n in range(5)}
    _, used = play(run, tmp_path, scenario, Scripted(script=script))
    assert used.state()["not_recorded"] == {"/v1/0": 1, "/v1/1": 1, "other addresses": 3}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_packed_request_that_is_answered_is_not_lost_silently(run: Run, tmp_path: Path, path: str) -> None:
    async def scenario(setup: RecorderSetup) -> None:
        packed = gzip.compress(b'{"messages": []}')
        headers = {"Content-Encoding": "gzip"}
        await (await setup.http.post(setup.recorded + path, data=packed, headers=headers)).read()

    play(run, tmp_path, scenario, Scripted(script={path: {"choices": []}}))
    assert "its request is packed" in run.rejections.get().reason


def test_settings_that_are_missing_are_not_put_elsewhere() -> None:
    amended = wire.amend(DIALECTS["/inference/v1/generate"], b'{"token_ids": [1]}', logprobs=True)
    assert amended is not None and json.loads(amended[0]) == {
        "token_ids": [1], "return_token_ids": True, "sampling_params": {"logprobs": 0},
    }


def test_answers_of_another_shape_pass_and_are_rejected(run: Run, tmp_path: Path) -> None:
    bodies = [[], {}, {"output": 3}, {"output": [3]}, {"input_messages": 3}, {"content": 3}, {"choices": [3]}, "x"]
    bodies += [{"output": [], "input_messages": [{**RAW, "tokens": [-1]}], "output_messages": [{**RAW, "tokens": "x"}]}]

    async def scenario(setup: RecorderSetup) -> None:
        for path in ("/v1/responses", "/v1/messages", "/generate", "/inference/v1/generate"):
            for body in bodies:
                server.script = {path: body}
                async with setup.http.post(setup.recorded + path, json={"input": 3, "messages": 4}) as answer:
                    await answer.read()

    server = Scripted()
    _, writer = play(run, tmp_path, scenario, server)
    state = writer.state()
    assert state["stored"] + state["unread"] == state["calls"] > 20 and run.n_rejected == state["unread"]
    assert all("A call could not be recorded" in one.reason for one in run.rejections.all())


class TestSessionNames:
    @pytest.mark.parametrize(
        ("headers", "caller"),
        [
            ({}, ("", "")),
            ({"X-Session-Id": "a"}, ("a", "")),
            ({"X-OpenCode-Session": "a"}, ("a", "")),
            ({"X-Session-Id": "b", "X-Parent-Session-Id": "a"}, ("a", "b")),
            ({"X-Claude-Code-Session-Id": "a"}, ("a", "")),
            ({"X-Claude-Code-Session-Id": "a", "X-Claude-Code-Agent-Id": "g"}, ("a", "g")),
            ({"Session-Id": "a"}, ("a", "")),
            ({"Conversation_Id": "a"}, ("a", "")),
            ({"X-Codex-Turn-Metadata": '{"session_id": "a", "agent_name": "x/y"}'}, ("a", "x/y")),
            ({"X-Codex-Turn-Metadata": '{"session_id": "a", "thread_id": "a"}'}, ("a", "")),
            ({"X-Codex-Turn-Metadata": '{"session_id": "a", "thread_id": "t"}'}, ("a", "t")),
            ({"X-Codex-Turn-Metadata": '{"session_id": 3}', "Session-Id": "a"}, ("a", "")),
            ({"X-Codex-Turn-Metadata": "[" * 100_000, "Session-Id": "a"}, ("a", "")),
            ({"X-Session-Id": "\n", "Session-Id": "a"}, ("a", "")),
        ],
    )
    def test_headers(self, headers: dict[str, str], caller: Caller) -> None:
        assert SessionNames().caller(headers) == caller

    def test_a_session_of_a_session_belongs_to_the_first(self) -> None:
        names = SessionNames()
        assert names.caller({"X-Session-Id": "b", "X-Parent-Session-Id": "a"}) == ("a", "b")
        assert names.caller({"X-Session-Id": "c", "X-Parent-Session-Id": "b"}) == ("a", "c")
        assert names.caller({"X-Session-Id": "c"}) == ("a", "c")
        assert names.caller({"X-Session-Id": "a", "X-Parent-Session-Id": "c"}) == ("a", "")

    def test_address_and_key(self) -> None:
        names = SessionNames()
        assert names.caller({"X-Session-Id": "a"}, "b", "c") == ("a", "")
        assert names.caller({}, "b", "c") == ("b", "") and names.caller({}, "", "c") == ("c", "")
        assert session_of_key("Bearer session:one") == ("one", "")
        assert session_of_key("bearer session:one:sk-1:2") == ("one", "Bearer sk-1:2")
        assert session_of_key("Bearer sk-1") == session_of_key("Basic session:x") == session_of_key("") == ("", "")

    def test_sub_agents_are_lanes_of_their_session(self, run: Run, tmp_path: Path) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            calls = [("q", ""), ("explore", "explorer"), ("q", "")]
            for n, (question, agent) in enumerate(calls):
                said = [question] if n < 2 else [question, "turn 0", "and?"]
                messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
                headers = {"X-Claude-Code-Session-Id": "s", **({"X-Claude-Code-Agent-Id": agent} if agent else {})}
                body = {"model": "m", "messages": messages}
                url = f"{setup.recorded}/v1/chat/completions"
                async with setup.http.post(url, json=body, headers=headers) as answer:
                    await answer.read()

        play(run, tmp_path, scenario)
        stored = run.trajectories.get()
        steps = load_trajectory(stored).steps
        assert [step.extra.get("line", {}).get("agent") for step in steps] == [None, "explorer", None]
        assert stored.n_rows == 2

    def test_the_key_of_the_server_passes_on(self, run: Run, tmp_path: Path) -> None:
        async def scenario(setup: RecorderSetup) -> None:
            for key in ("session:one:sk-1", "session:one", "sk-2"):
                body = {"model": "m", "messages": [{"role": "user", "content": key}]}
                headers = {"Authorization": f"Bearer {key}"}
                url = f"{setup.recorded}/v1/chat/completions"
                async with setup.http.post(url, json=body, headers=headers) as answer:
                    await answer.read()

        server = FakeServer()
        play(run, tmp_path, scenario, server)
        sent = [headers.get("Authorization") for _, headers, _ in server.seen]
        assert sent == ["Bearer sk-1", None, "Bearer sk-2"]
        assert run.trajectories.get(external_id="one").n_steps == 2


def test_a_call_over_which_the_weights_changed_has_several_versions(run: Run, tmp_path: Path) -> None:
    spans = [{"version": "v7", "start": 0, "end": 1}, {"version": "v8", "start": 1, "end": 2}]
    choice = {"index": 0, "token_ids": SAMPLED, "finish_reason": "stop", "weight_versions": spans}
    answer = {"prompt_token_ids": PROMPT, "choices": [choice]}
    request = {"token_ids": PROMPT, "sampling_params": {}}
    _, _, value, _ = recorded(run, tmp_path, "/inference/v1/generate", request, answer)
    assert value.steps[0].policy_version == "v8"
    assert value.steps[0].extra["policy_versions"] == [["v7", 1], ["v8", 1]]
    assert "mixed_policy_versions" in {finding.kind for finding in examine(value, None).findings}
