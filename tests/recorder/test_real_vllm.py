"""Real vLLM servers: asked by the engine that asks servers, and recorded by the proxy in front of one."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.db import connection

from rollout_inspector.streams.alternatives import unpacked
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.tokenizers import load
from rollouts.jobs.launch import LaunchSettings, can_resume, launch
from rollouts.recorder.choices import join_stream
from rollouts.sampling.engines import Generation, GenerationRequest, Sampling, build_engine
from rollouts.store.chat_templates.tokenizers import load_tokenizer, register_tokenizer
from rollouts.store.models import Run, StoredStep
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts
from tests.conftest import missing, wait_until
from tests.ports import HeldPort
from tests.recorder.conftest import Start, ask, stop

# All of them use the database, or pytest-django would run them far apart and the servers would start twice.
pytestmark = [pytest.mark.vllm, pytest.mark.django_db(transaction=True)]


@dataclass
class Servers:
    """Two servers of the demo policy, by the way they take ids. They start side by side."""

    urls: dict[str, str]
    begin: Callable[[str], None]
    kill: Callable[[str], None]


@pytest.fixture(scope="module")
def servers(vllm_available: bool, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "TORCHDYNAMO_DISABLE": "1"}
    ways: dict[str, list[str]] = {"/v1/completions": [], "/inference/v1/generate": [
        "--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]}
    held = {name: HeldPort() for name in ways}
    ports = {name: port.number for name, port in held.items()}
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(name: str) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_tokenizer),
                   "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(ports[name]),
                   "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill",
                   "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32",
                   "--logprobs-mode", "processed_logprobs", *ways[name]]
        with (folder / f"{ports[name]}.log").open("wb") as file:
            processes[name] = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def kill(name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[name].pid, signal.SIGKILL)  # its engine is a process of its own, and may be left behind
        processes[name].wait(60)

    for name in ways:
        begin(name)
    urls = {name: port.url for name, port in held.items()}
    try:
        for name, process in processes.items():
            wait_until(partial(ended_or_healthy, process, urls[name]), 400, "the vLLM server answers")
            if process.poll() is not None:
                log = folder / f"{ports[name]}.log"
                missing(f"the vLLM server did not start:\n{log.read_text(errors='replace')[-2000:]}")
        yield Servers(urls, begin, kill)
    finally:
        for process in processes.values():
            process.terminate()
        for name, process in processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            kill(name)
            held[name].close()


def ended_or_healthy(process: subprocess.Popen[bytes], url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
    except OSError:
        return process.poll() is not None
    return True


WAYS = ["/v1/completions", "/inference/v1/generate"]


@pytest.fixture
def engine(servers: Servers, way: str) -> Iterator[Any]:
    built: Any = build_engine("vllm_server", servers.urls[way], vocab_size=1200, model="demo")
    assert built._path == way
    yield built
    built.close()


def complete(engine: Any, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Generation:
    """One completion, of 16 tokens drawn by the seed 3 unless told otherwise."""
    sampling = {"seed": 3, "max_tokens": 16} | sampling
    engine.add(GenerationRequest("r", ids_array(list(prompt)), Sampling(**sampling)))
    found: list[Generation] = []
    wait_until(lambda: bool(found.extend(engine.step()) or found), 120, "the completion has come")
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_asks_a_real_server(engine: Any) -> None:
    first, again = complete(engine), complete(engine)
    assert first.completion_ids.tolist() == again.completion_ids.tolist() and first.completion_ids.size == 16
    assert first.logprobs.size == 16 and (first.logprobs <= 0).all() and first.finish_reason == "length"
    wanted = int(first.completion_ids[3])
    stopped = complete(engine, stop_token_ids=(wanted,))
    assert stopped.completion_ids[-1] == wanted and stopped.stop_reason == str(wanted)
    told = complete(engine, alternatives=3)
    assert told.completion_ids.tolist() == first.completion_ids.tolist()
    np.testing.assert_allclose(told.logprobs, first.logprobs, atol=1e-5)
    found = unpacked(told.alternative_ids, told.alternative_logprobs, 16)
    assert found is not None
    alternative_ids, alternative_logprobs = found
    assert alternative_ids.shape == (16, 3) and (np.diff(alternative_logprobs) <= 0).all()
    for token, logprob, ids, values in zip(
        told.completion_ids, told.logprobs, alternative_ids, alternative_logprobs, strict=True
    ):
        assert values[ids == token] == pytest.approx([logprob]) if token in ids else logprob <= values[-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_text_ends_behind_the_token_that_completes_it(engine: Any, tiny_tokenizer: Path) -> None:
    """Texts that end at a token, inside one, and that only several tokens spell: no sampled id is cut or made up."""
    codec = load(tiny_tokenizer)
    prompt = codec.encode("<|im_start|>user\nWhat is 12 * 7?<|im_end|>\n<|im_start|>assistant\n").tolist()
    whole = complete(engine, prompt, max_tokens=48)
    ids = whole.completion_ids
    pieces = [codec.decode(ids[n : n + 1]) for n in range(len(ids))]
    several = next(n for n in range(2, len(ids)) if pieces[n].isascii() and pieces[n - 1].isascii())
    long = next(n for n in range(len(ids)) if len(pieces[n]) > 2 and pieces[n].isascii() and "<" not in pieces[n])
    for text in (pieces[several - 1] + pieces[several], pieces[long][:-1], pieces[long]):
        stopped = complete(engine, prompt, max_tokens=48, stop=(text,))
        length = len(stopped.completion_ids)
        assert stopped.completion_ids.tolist() == ids[:length].tolist()
        assert stopped.logprobs.size == length
        assert np.allclose(stopped.logprobs, whole.logprobs[:length], atol=1e-4)
        said, before = codec.decode(ids[:length]), codec.decode(ids[: length - 1])
        assert text in said and text not in before
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", text)


@pytest.fixture
def far(servers: Servers, tiny_tokenizer: Path, settings: Any) -> Iterator[LaunchSettings]:
    """A launch on the demo policy that somebody else serves."""
    entry = {"engine": "vllm_server", "path": str(tiny_tokenizer)}
    options = {"url": servers.urls["/v1/completions"], "model": "demo", "logprobs_mode": "processed"}
    settings.INSPECTOR_MODELS = {"far": entry | {"options": options}}
    yield LaunchSettings(model="far", prompts=6, group=2, temperature=0.0, seed=3)
    run_rollouts.close_engines()


def test_a_run_asks_a_real_server(far: LaunchSettings) -> None:
    run = launch(replace(far, stop=["</tool_call>"]), enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    assert (run.status, run.error, run.n_finished, run.n_failed) == ("done", "", 12, 0)
    steps = StoredStep.objects.filter(trajectory__run=run)
    assert steps.count() > 12 and all(step.engine.startswith("vllm_server 0") for step in steps)
    assert "</tool_call>" in set(steps.values_list("stop_reason", flat=True))
    assert set(steps.values_list("logprobs_mode", flat=True)) == {"processed"}
    codec = load_tokenizer(run.tokenizer.files_sha256)  # type: ignore[union-attr]
    for record in run.trajectories.all():
        value = load_trajectory(record)
        for before, after in pairwise(value.steps):
            assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist()
        # What ended it is the last token's, and nothing is cut off the reply but what stands behind the call.
        called = [step for step in value.steps if step.stop_reason == "</tool_call>"]
        assert all(codec.decode(step.completion_ids).endswith("</tool_call>") for step in called)
        assert all(step.reply and step.reply["tool_calls"] for step in called)


def test_a_run_outlives_its_server(
    far: LaunchSettings, servers: Servers, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed in mid-run and started again: what was asked is asked again, no step lost or twice."""
    way = "/v1/completions"
    settings.INSPECTOR_MODELS["far"]["options"] |= {"max_live": 8}
    killed, store = threading.Event(), run_rollouts._Work._write

    def write(self: Any, steps: Any, finished: Any) -> None:
        if not killed.is_set():
            servers.kill(way)
            killed.set()
        store(self, steps, finished)

    monkeypatch.setattr(run_rollouts._Work, "_write", write)
    run = launch(replace(far, prompts=40, temperature=1.0), enqueue=False)
    working = threading.Thread(target=_work_and_close, args=(run.pk,))
    working.start()
    try:
        assert killed.wait(240)
        assert run.trajectories.filter(status="done").count() < 80
        servers.begin(way)
    finally:
        working.join(400)
    run.refresh_from_db()
    assert (run.status, run.error, run.n_finished, run.n_failed) == ("done", "", 80, 0)
    assert run.n_steps == StoredStep.objects.filter(trajectory__run=run).count()
    assert set(run.trajectories.values_list("attempt", flat=True)) == {1}


def _work_and_close(run_id: int) -> None:
    try:
        run_rollouts.work_on(run_id)
    finally:
        connection.close()


def test_a_run_whose_server_stays_away_ends_with_a_sentence(
    far: LaunchSettings, servers: Servers, settings: Any, port: HeldPort
) -> None:
    settings.INSPECTOR_MODELS["far"]["options"] |= {"url": port.url}
    run = launch(far, enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    assert run.status == "failed" and "No server answers at http://127.0.0.1" in run.error
    assert "Start it, or correct the address" in run.error and can_resume(run)


def test_a_real_server_is_recorded(start: Start, servers: Servers, tiny_tokenizer: Path) -> None:
    direct = servers.urls["/v1/completions"]
    register_tokenizer(tiny_tokenizer, "demo")
    process, said = start(direct, "--tokenizer", "demo", "--logprobs")
    assert said["engine"].startswith("vllm 0")
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 24,
            "temperature": 0, "seed": 1}
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
        fields = {name for event in map(json.loads, events) for part in (event, event["choices"][0]) for name in part}
        texts.append((join_stream([json.loads(event) for event in events], False) | same, fields))
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
    assert counts == {"run": said["run"], "calls": 4, "stored": 4, "without_ids": 0, "unread": 0, "rescued": 0,
                      "not_recorded": {}}
    run = Run.objects.get(code=said["run"])
    values = {one.external_id: load_trajectory(one) for one in run.trajectories.all()}
    assert run.error == "" and {name: len(value.steps) for name, value in values.items()} == {"a": 2, "b": 1, "c": 1}
    whole, streamed = values["a"].steps[0], values["b"].steps[0]
    assert whole.stream.tolist() == streamed.stream.tolist()
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.completion_ids) > 0
    assert values["c"].steps[0].prompt_ids.tolist() == [5, 6, 7] and values["c"].steps[0].completion_ids.size == 4


DIALECTS: dict[str, dict[str, Any]] = {
    "responses": {"input": "What is 2 + 3?", "instructions": "Be short.", "max_output_tokens": 12, "store": False},
    "messages": {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "system": "Be short.", "max_tokens": 12},
    "chat/completions": {"max_tokens": 12, "messages": [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 2 + 3?"},
    ]},
}
VARYING = {"id": "", "created": 0, "created_at": 0, "request_id": "", "metrics": None}


def without_names(value: Any) -> Any:
    """A body without the names and times that a server makes anew for each call."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: VARYING.get(name, without_names(one)) for name, one in value.items() if "completed_at" not in name}


def test_every_dialect_of_a_real_server_is_recorded(start: Start, servers: Servers, tiny_tokenizer: Path) -> None:
    """One question in each dialect: the client sees what it sees without the recorder, and the ids are the engine's."""
    direct = servers.urls["/inference/v1/generate"]
    register_tokenizer(tiny_tokenizer, "demo")
    process, said = start(direct, "--tokenizer", "demo")
    recorded = said["url"].removesuffix("/v1")
    for name, body in DIALECTS.items():
        for stream in (False, True):
            body = {"model": "demo", "temperature": 0, "stream": stream, **body}
            seen = []
            for base in (direct, recorded):
                headers = {"Content-Type": "application/json", "X-Session-Id": f"{name} {stream}"}
                request = urllib.request.Request(f"{base}/v1/{name}", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=120) as answer:
                    text = answer.read().decode()
                lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
                seen.append([without_names(json.loads(line)) for line in lines])
            if stream:  # pieces are cut as they happen to come
                seen = [[event for event in events if event.get("type") == "response.completed"] for events in seen]
            assert seen[0] == seen[1], name
    prompt = {"token_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_tokens": 4}}
    assert without_names(ask(f"{recorded}/inference/v1/generate", prompt, "ids")) == without_names(
        ask(f"{direct}/inference/v1/generate", prompt)
    )
    ask(f"{recorded}/v1/messages/count_tokens", {"model": "demo", **DIALECTS["messages"]})
    counts = stop(process)
    assert (counts["calls"], counts["stored"], counts["without_ids"], counts["not_recorded"]) == (7, 7, 2, {})
    run = Run.objects.get(code=said["run"])
    assert "2 of 7 recorded calls are of the dialect Messages" in run.error
    values = {one.external_id: load_trajectory(one).steps[0] for one in run.trajectories.all()}
    chat = values["chat/completions False"]
    for name in ("chat/completions True", "responses False", "responses True"):
        assert values[name].stream.tolist() == chat.stream.tolist(), name
        assert values[name].request is not None and chat.request is not None
        assert list(values[name].request.messages) == list(chat.request.messages)  # type: ignore[union-attr]
    for name in ("messages False", "messages True"):
        assert not len(values[name].stream) and list(values[name].request.messages) == list(chat.request.messages)  # type: ignore
        assert values[name].reply["content"] == chat.reply["content"]  # type: ignore[index]
    assert values["ids"].prompt_ids.tolist() == [5, 6, 7] and values["ids"].completion_ids.size == 4
    codec = load(tiny_tokenizer)
    assert codec.decode(chat.completion_ids).startswith(chat.reply["content"][:5])  # type: ignore[index]


def test_published_clients_see_what_they_see_without_the_recorder(
    start: Start, servers: Servers, tiny_tokenizer: Path
) -> None:
    """Every call of each client, streamed or not, is a step with the engine's own ids."""
    packages = Path(os.environ.get("INSPECTOR_TEST_CLIENTS") or Path(sys.prefix) / "clients")
    if not (packages / "litellm").is_dir():
        missing(f"{packages} has no litellm: `make .venv/.installed-dev` installs requirements-clients.txt into it")
    direct = servers.urls["/inference/v1/generate"]
    register_tokenizer(tiny_tokenizer, "demo")
    process, said = start(direct, "--tokenizer", "demo")
    urls = [f"{direct}/v1", f"{said['url'].removesuffix('/v1')}/session/{{}}/v1"]
    environment = {**os.environ, "PYTHONPATH": str(packages), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    script = str(Path(__file__).with_name("clients.py"))
    ran = subprocess.run(
        [sys.executable, script, *urls], capture_output=True, text=True, timeout=900, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    plain, seen = json.loads(ran.stdout.splitlines()[-1]).values()
    assert seen == plain and len(seen) == 7
    counts = stop(process)
    n_calls = sum(map(len, seen.values()))
    assert (counts["calls"], counts["stored"], counts["without_ids"]) == (n_calls, n_calls, len(seen["anthropic"]))
    assert (counts["unread"], counts["not_recorded"]) == (0, {})
    values = {one.external_id: load_trajectory(one) for one in Run.objects.get(code=said["run"]).trajectories.all()}
    assert values.keys() == seen.keys()
    for name, answers in seen.items():
        steps = values[name].steps
        assert any(calls for _, calls in answers) and len(steps) == len(answers), name
        kept, wanted = [], []
        for step, (text, calls) in zip(steps, answers, strict=True):
            reply: Any = step.reply
            functions = [call["function"] for call in reply.get("tool_calls") or ()]
            told = [(one["name"], json.loads(one["arguments"])) for one in functions]
            kept.append((reply.get("content") or "", told, step.prompt_ids.tolist(), step.completion_ids.tolist()))
            assert step.request is not None and step.request.tools
            body = {"model": "demo", "messages": list(step.request.messages), "tools": list(step.request.tools),
                    "temperature": 0, "max_tokens": 48, "return_token_ids": True}
            engine = ask(f"{direct}/v1/chat/completions", body)
            ids = engine["prompt_token_ids"], engine["choices"][0]["token_ids"]
            ids = ([], []) if name == "anthropic" else ids  # no server tells ids in its dialect
            wanted.append((text, [(function, json.loads(arguments)) for function, arguments in calls], *ids))
        assert kept == wanted, name
        assert any("84" in str(one.get("content")) for one in steps[-1].request.messages)  # type: ignore[union-attr]
