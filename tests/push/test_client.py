"""The client, as a single file outside the project, against a real server and against bad ones."""

import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.client import client
from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.people import make_member
from tests.push.conftest import call, episodes


@pytest.fixture
def live_token(transactional_db: None) -> str:
    return create_api_key(make_member("bob"))[1]


@pytest.mark.django_db(transaction=True)
class TestAgainstTheServer:
    def test_one_line_makes_a_run_and_pushes(self, live_server: Any, live_token: str) -> None:
        answer = client.push(live_server.url, live_token, None, episodes(3))
        run = Run.objects.get(code=answer["run"])
        assert answer["trajectories"] == run.n_trajectories == 3
        again = client.push(live_server.url, live_token, run.code, (one for one in episodes(4)))
        assert (again["trajectories"], again["known"]) == (1, 3)
        later = client.push(live_server.url, live_token, run.code, episodes(2), prefix="step 2/ä&", step=2)
        assert later["trajectories"] == 2
        assert run.trajectories.get(external_id="step 2/ä&s1").training_step == 2

    def test_arrays_text_and_numbers_that_json_lacks(self, live_server: Any, live_token: str) -> None:
        record = call("a", np.array([1, 2]), np.array([3], dtype=np.int32))  # type: ignore[arg-type]
        record["response"]["choices"][0]["logprobs"] = np.array([np.nan], dtype=np.float32)
        line = json.dumps(call("b", [1], [2]))
        server = client.Client(live_server.url, live_token)
        code = server.create_run("mixed")
        assert server.push([record, line, call("c", [1], [2], reward=float("inf"))])["trajectories"] == 3
        run = Run.objects.get(code=code)
        step = load_trajectory(run.trajectories.get(external_id="a")).steps[0]
        assert step.stream.tolist() == [1, 2, 3] and step.logprobs is not None and np.isnan(step.logprobs).all()

    def test_refusals_carry_the_servers_sentence(self, live_server: Any, live_token: str) -> None:
        with pytest.raises(client.PushError, match="revoked") as refused:
            client.push(live_server.url, "ri_wrong", "zzzzzzzzzzzz", episodes(1))
        assert refused.value.status == 401
        with pytest.raises(client.PushError, match="There is no run"):
            client.push(live_server.url, live_token, "zzzzzzzzzzzz", episodes(1))

    def test_copied_out_it_runs_without_any_package(self, live_server: Any, live_token: str, tmp_path: Path) -> None:
        shutil.copy(str(client.__file__), tmp_path / "client.py")
        program = (
            "import sys, json, client\n"
            "records = json.load(sys.stdin)\n"
            f"print(json.dumps(client.push({live_server.url!r}, {live_token!r}, None, records)))\n"
            "assert 'django' not in sys.modules and 'numpy' not in sys.modules"
        )
        # -S: no site-packages; -E: no environment of ours.
        ran = subprocess.run(
            [sys.executable, "-S", "-E", "-c", program], input=json.dumps(episodes(2)), capture_output=True, text=True,
            cwd=tmp_path, timeout=180,
        )
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["trajectories"] == 2


Answer = Callable[[int], tuple[Any, ...]]
"""From the number of a request to status, body and headers."""


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, list[bytes]]]]:
    """A server that answers its n-th request as the function says; gives its address and the bodies it got."""
    servers = []

    def start(answer: Answer) -> tuple[str, list[bytes]]:
        got: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(self.rfile.read(int(self.headers["Content-Length"])))
                status, body, *headers = answer(len(got))
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:9/")
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}", got

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("failure", [(503, b"busy"), (0, b""), (429, b'{"error": "slow down"}')])
def test_it_tries_again_with_the_same_bytes(serve: Any, failure: tuple[int, bytes]) -> None:
    url, got = serve(lambda n: failure if n < 3 else (200, b'{"trajectories": 1}'))
    assert client.Client(url, "t", "code", wait=0.01).push(episodes(1)) == {"trajectories": 1}
    assert len(got) == 3 and len(set(got)) == 1


def test_it_waits_as_long_as_the_server_asks(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, got = serve(lambda n: (503, b"busy", ("Retry-After", "7")) if n < 3 else (200, b'{"trajectories": 1}'))
    waits: list[float] = []
    monkeypatch.setattr("rollout_inspector.client.client.time.sleep", waits.append)
    client.Client(url, "t", "code", wait=0.01).push(episodes(1))
    assert len(got) == 3 and len(waits) == 2 and all(7 <= wait <= 10.5 for wait in waits)
    assert [client._seconds(said) for said in (None, "7", "9000", "-1", "soon")] == [0, 7, 60, 0, 0]


@pytest.mark.parametrize(
    ("answer", "tries", "words"),
    [
        ((400, b'{"error": "A sentence."}'), 1, "A sentence"),
        ((302, b""), 1, "HTTP 302"),
        ((200, b"<html>"), 1, "not Rollout Inspector"),
        ((200, b"[1]"), 1, "not Rollout Inspector"),
        ((500, b"\xff"), 2, "HTTP 500"),
        ((0, b""), 2, "does not answer"),
    ],
)
def test_it_gives_up_with_a_sentence(serve: Any, answer: tuple[int, bytes], tries: int, words: str) -> None:
    url, got = serve(lambda n: answer)
    with pytest.raises(client.PushError, match=words):
        client.Client(url, "t", "code", tries=2, wait=0.01).push(episodes(1))
    assert len(got) == tries


def test_nothing_is_sent_for_nothing(serve: Any) -> None:
    url, got = serve(lambda n: (500, b""))
    assert client.push(url, "t", "code", [])["trajectories"] == 0 and got == []


def test_it_imports_the_standard_library_only() -> None:
    import ast

    tree = ast.parse(Path(str(client.__file__)).read_text(encoding="utf-8"))
    names = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names <= set(sys.stdlib_module_names)
    assert importlib.util.find_spec("rollout_inspector.client.client") is not None
