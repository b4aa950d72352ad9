"""`manage.py record` as a process: refusals, and a recording that survives SIGTERM."""

import io
import json
import socket
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from django.core.management import CommandError, call_command

from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from tests.recorder.conftest import Start, ask, stop


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--upstream", "http://10.0.0.1:8000"], "INSPECTOR_ENGINE_HOSTS"),
        (["--upstream", "file:///etc/passwd"], "not a server address"),
        (["--upstream", "http://localhost:1", "--tokenizer", "none such"], "register_tokenizer"),
        (["--upstream", "http://localhost:1", "--port", "70000"], "65535"),
        (["--upstream", "http://localhost:1", "--host", "0.0.0.0"], "INSPECTOR_RECORDER_TOKEN"),
        (["--upstream", "http://localhost:1", "--token", "short"], "at least 16"),
        (["--upstream", "http://localhost:1", "--token", "a token with blanks and / in it"], "at least 16"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=words):
        call_command("record", *arguments, stdout=io.StringIO())
    assert not Run.objects.exists()


@pytest.mark.django_db
def test_a_run_that_was_not_recorded_is_not_gone_on_with() -> None:
    run = create_run(Run.Kind.IMPORT, "imported")
    with pytest.raises(CommandError, match="was not recorded"):
        call_command("record", "--upstream", "http://localhost:1", "--run", run.code, stdout=io.StringIO())


def test_nothing_is_lost_at_shutdown(start: Start) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            choice = {"index": 0, "token_ids": [3, 4], "message": {"role": "assistant", "content": "x"},
                      "finish_reason": "stop"}
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


def test_a_harness_may_describe_its_turn_in_a_long_header(start: Start) -> None:
    process, said = start("http://127.0.0.1:9")
    headers = {"X-Codex-Turn-Metadata": json.dumps({"session_id": "a", "cwd": "x" * 64_000})}
    request = urllib.request.Request(said["url"].removesuffix("/v1") + "/recorder", headers=headers)
    assert json.loads(urllib.request.urlopen(request, timeout=60).read())["not_recorded"] == {}
    stop(process)


def test_a_taken_port_leaves_no_run(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(CommandError, match="Choose another --port"):
        arguments = ["--upstream", "http://localhost:9", "--port", str(taken.getsockname()[1])]
        call_command("record", *arguments, stdout=io.StringIO())
    assert not Run.objects.exists()
