"""`manage.py record` as a process: refusals, a recording that survives SIGTERM, and a real vLLM behind it."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from rollouts import selectors, services
from rollouts.models import Run
from rollouts.recorder import wire
from tests.conftest import ROOT, missing

Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--upstream", "http://10.0.0.1:8000"], "INSPECTOR_ENGINE_HOSTS"),
        (["--upstream", "file:///etc/passwd"], "no server address"),
        (["--upstream", "http://localhost:1", "--tokenizer", "none such"], "register_tokenizer"),
        (["--upstream", "http://localhost:1", "--port", "70000"], "65535"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command("record", *arguments, stdout=io.StringIO())
    assert not Run.objects.exists()


@pytest.mark.django_db
def test_a_run_that_was_not_recorded_is_not_gone_on_with() -> None:
    run = services.create_run(Run.Kind.IMPORT, "imported")
    with pytest.raises(CommandError, match="was not recorded"):
        call_command("record", "--upstream", "http://localhost:1", "--run", run.code, stdout=io.StringIO())


@pytest.fixture
def start(transactional_db: None, settings: Any) -> Iterator[Start]:
    """Start `manage.py record` on the test's database; gives the process and what it says first."""
    database = connection.settings_dict
    if connection.vendor == "sqlite":
        url = f"sqlite:///{database['NAME']}"
    else:
        login = f"{database['USER']}:{database['PASSWORD']}@" if database["PASSWORD"] else f"{database['USER']}@"
        url = f"postgres://{login}{database['HOST']}:{database['PORT'] or 5432}/{database['NAME']}"
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "inspector.settings", "DATABASE_URL": url,
        "INSPECTOR_DATA": str(settings.INSPECTOR_DATA), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = []

    def begin(upstream: str, *arguments: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [sys.executable, "manage.py", "record", "--upstream", upstream, "--port", "0", "--json", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(10)


def ask(url: str, body: Any, session: str = "") -> Any:
    headers = {"Content-Type": "application/json", **({"X-Session-Id": session} if session else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def stop(process: subprocess.Popen[str]) -> dict[str, Any]:
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return dict(json.loads(out))


def test_nothing_is_lost_at_shutdown(start: Start) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            choice = {"index": 0, "token_ids": [3, 4], "message": {"role": "assistant", "content": "x"},
                      "finish_reason": "stop"}  # fmt: skip
            raw = json.dumps({"prompt_token_ids": [1, 2], "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        process, said = start(f"http://127.0.0.1:{server.server_address[1]}/v1", "--run", "harness")
        n = 60
        for i in range(n):
            ask(f"{said['url']}/chat/completions", {"messages": [{"role": "user", "content": str(i)}]}, f"s{i}")
        counts = stop(process)  # at once: most are not stored yet
    finally:
        server.shutdown()
        server.server_close()
    assert counts["calls"] == counts["stored"] == n
    run = Run.objects.get(code=said["run"])
    assert (run.name, run.status, run.n_trajectories, run.n_finished) == ("harness", "done", n, n)


def test_a_taken_port_leaves_no_run(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandError, match="Choose another --port"):
            arguments = ["--upstream", "http://localhost:9", "--port", str(taken.getsockname()[1])]
            call_command("record", *arguments, stdout=io.StringIO())
    assert not Run.objects.exists()


@pytest.mark.vllm
def test_a_real_vllm_server(start: Start, vllm_available: None, tiny_tokenizer: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_tokenizer),
               "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
               "--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(64 << 20),
               "--block-size", "32"]  # fmt: skip
    log = tmp_path / "server.log"
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    services.register_tokenizer(tiny_tokenizer, "demo")
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        direct = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 150
        while True:
            try:
                urllib.request.urlopen(f"{direct}/health", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    missing(f"the vLLM server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.5)
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
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = answer.read().decode().split("\n\n")
            # Pieces are cut as they happen to come; what they add up to, and which fields they have, is the same.
            events = [event[6:].encode() for event in found if event.startswith("data: {")]
            fields = {tuple(json.loads(event)) + tuple(json.loads(event)["choices"][0]) for event in events}
            texts.append((wire.join_stream(events, False) | same, fields))
            assert found[-2] == "data: [DONE]"
        assert texts[0] == texts[1]
        completion = {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        assert (
            ask(f"{said['url']}/completions", completion, "c") | same
            == ask(f"{direct}/v1/completions", completion) | same
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{said['url']}/chat/completions", body | {"model": "other"})
        assert refused.value.code == 404
        assert json.loads(urllib.request.urlopen(f"{said['url']}/models").read())["data"]
        counts = stop(process)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    assert counts == {"run": said["run"], "calls": 4, "stored": 4, "without_ids": 0, "unread": 0, "rescued": 0}
    run = Run.objects.get(code=said["run"])
    values = {one.external_id: selectors.load_trajectory(one) for one in run.trajectories.all()}
    assert run.error == "" and {name: len(value.steps) for name, value in values.items()} == {"a": 2, "b": 1, "c": 1}
    whole, streamed = values["a"].steps[0], values["b"].steps[0]
    assert whole.stream.tolist() == streamed.stream.tolist()
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.completion_ids) > 0
    assert values["c"].steps[0].prompt_ids.tolist() == [5, 6, 7] and values["c"].steps[0].completion_ids.size == 4
