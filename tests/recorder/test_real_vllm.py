"""Real vLLM servers: asked by the engine that asks servers, and recorded by the proxy in front of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollouts import selectors, services
from rollouts.engines import GenerationRequest, Sampling, build_engine
from rollouts.models import Run
from rollouts.recorder import wire
from rollouts.tito.trajectory import ids_array
from tests.conftest import missing, wait_until
from tests.recorder.conftest import Start, ask, stop

# All of them use the database, or pytest-django would run them far apart and the servers would start twice.
pytestmark = [pytest.mark.vllm, pytest.mark.django_db(transaction=True)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def servers(
    vllm_available: bool, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Addresses of two servers of the demo policy, by the way they take ids. They start side by side."""
    folder = tmp_path_factory.mktemp("servers")
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    processes, urls = {}, {}
    for name, options in {"/v1/completions": [], "/inference/v1/generate": ["--enable-scale-out"]}.items():
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_tokenizer),
                   "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                   "--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(64 << 20),
                   "--block-size", "32", "--logprobs-mode", "processed_logprobs", *options]  # fmt: skip
        with (folder / f"{port}.log").open("wb") as file:
            processes[name] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        urls[name] = f"http://127.0.0.1:{port}"
    try:
        for name, process in processes.items():
            wait_until(partial(ended_or_healthy, process, urls[name]), 400, "the vLLM server answers")
            if process.poll() is not None:
                log = folder / f"{urls[name].rpartition(':')[2]}.log"
                missing(f"the vLLM server did not start:\n{log.read_text(errors='replace')[-2000:]}")
        yield urls
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own, and may be left behind
            process.wait(30)


def ended_or_healthy(process: subprocess.Popen[bytes], url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
    except OSError:
        return process.poll() is not None
    return True


@pytest.mark.parametrize("way", ["/v1/completions", "/inference/v1/generate"])
def test_the_engine_asks_a_real_server(servers: dict[str, str], way: str) -> None:
    engine: Any = build_engine("vllm_server", servers[way], vocab_size=500, model="demo")

    def complete(**sampling: Any) -> Any:
        engine.add(GenerationRequest("r", ids_array([5, 6, 7]), Sampling(seed=3, max_tokens=16, **sampling)))
        found: list[Any] = []
        wait_until(lambda: bool(found.extend(engine.step()) or found), 120, "the completion has come")
        return found[0]

    try:
        assert engine._path == way
        first, again = complete(), complete()
        assert first.completion_ids.tolist() == again.completion_ids.tolist() and first.completion_ids.size == 16
        assert first.logprobs.size == 16 and (first.logprobs <= 0).all() and first.finish_reason == "length"
        wanted = int(first.completion_ids[3])
        stopped = complete(stop_token_ids=(wanted,))
        assert stopped.completion_ids[-1] == wanted and stopped.stop_reason == str(wanted)
    finally:
        engine.close()


def test_a_real_server_is_recorded(start: Start, servers: dict[str, str], tiny_tokenizer: Path) -> None:
    direct = servers["/v1/completions"]
    services.register_tokenizer(tiny_tokenizer, "demo")
    process, said = start(direct, "--tokenizer", "demo", "--logprobs")
    assert said["engine"].startswith("vllm 0")
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 24,
            "temperature": 0, "seed": 1}  # fmt: skip
    same = {"created": 0, "id": ""}
    plain = ask(f"{direct}/v1/chat/completions", body)
    seen = ask(f"{said['url']}/chat/completions", body, "a")
    assert seen | same == plain | same
    again = [*body["messages"], seen["choices"][0]["message"], {"role": "user", "content": "And 3 + 4?"}]  # type: ignore
    ask(f"{said['url']}/chat/completions", body | {"messages": again}, "a")
    texts = []
    for base in (f"{direct}/v1", said["url"]):
        headers = {"Content-Type": "application/json", "X-Session-Id": "b"}
        asked = json.dumps(body | {"stream": True}).encode()
        request = urllib.request.Request(f"{base}/chat/completions", asked, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found = answer.read().decode().split("\n\n")
        # Pieces are cut as they happen to come; what they add up to, and which fields they have, is the same.
        events = [event[6:].encode() for event in found if event.startswith("data: {")]
        fields = {tuple(json.loads(event)) + tuple(json.loads(event)["choices"][0]) for event in events}
        texts.append((wire.join_stream(events, False) | same, fields))
        assert found[-2] == "data: [DONE]"
    assert texts[0] == texts[1]
    completion = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    assert (
        ask(f"{said['url']}/completions", completion, "c") | same == ask(f"{direct}/v1/completions", completion) | same
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(f"{said['url']}/chat/completions", body | {"model": "other"})
    assert refused.value.code == 404
    assert json.loads(urllib.request.urlopen(f"{said['url']}/models").read())["data"]
    counts = stop(process)
    assert counts == {"run": said["run"], "calls": 4, "stored": 4, "without_ids": 0, "unread": 0, "rescued": 0}
    run = Run.objects.get(code=said["run"])
    values = {one.external_id: selectors.load_trajectory(one) for one in run.trajectories.all()}
    assert run.error == "" and {name: len(value.steps) for name, value in values.items()} == {"a": 2, "b": 1, "c": 1}
    whole, streamed = values["a"].steps[0], values["b"].steps[0]
    assert whole.stream.tolist() == streamed.stream.tolist()
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.completion_ids) > 0
    assert values["c"].steps[0].prompt_ids.tolist() == [5, 6, 7] and values["c"].steps[0].completion_ids.size == 4
