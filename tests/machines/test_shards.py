"""Large work, done in parts by workers of two machines that share no folder: an import, a diagnosis, an export."""

import io
import json
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.formats import FORMATS
from rollout_inspector.streams.trajectory import Step, Trajectory
from rollouts.jobs.exports.exports import ExportOptions, write_run
from rollouts.jobs.imports import imports
from rollouts.store import files
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run
from rollouts.store.token_arrays.stores import folder_of
from tests.conftest import wait_until
from tests.machines.conftest import Browser, Machine, Machines
from tests.machines.small_parts import PART_BYTES
from tests.samples.machine_work import has_ended, jobs_done

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only]

N = 250
"""Trajectories of the larger file."""
LENGTH = 1500
"""Tokens of one step. The arrays of a part are enough for a segment."""


@pytest.fixture
def machine_environment() -> dict[str, str]:
    return {"INSPECTOR_TOKENS": "segments", "DJANGO_SETTINGS_MODULE": "tests.machines.settings"}


def lines(first: int, stop: int) -> bytes:
    """Trajectories of two steps; the second extends the first, or breaks."""
    random = np.random.default_rng(first)
    file, values = io.BytesIO(), []
    for n in range(first, stop):
        ids = random.integers(0, 1000, 3 * LENGTH, dtype=np.int32)
        first_step = Step(prompt_ids=ids[:LENGTH], completion_ids=ids[LENGTH : 2 * LENGTH])
        prompt = ids[: 2 * LENGTH + 10].copy()
        prompt[LENGTH] += n % 3 == 0
        second = Step(prompt_ids=prompt, completion_ids=ids[2 * LENGTH + 10 :])
        values.append(Trajectory(external_id=f"t{n}", steps=(first_step, second), reward=float(n % 2)))
    write = FORMATS["own_jsonl"].write
    assert write is not None
    write(values, file)
    return file.getvalue()


def imported(browser: Browser, data: dict[str, bytes]) -> str:
    """The code of a run that the import form made."""
    sent = [("files", one) for one in data.items()]
    form = {"name": "large", "format": "auto", "tokenizer": ""}
    return str(browser.press("/import.json", form, files=sent).json()["code"])


def tasks_done(machine: Machine) -> int:
    return len(re.findall(r"rollouts.do_job\[[^]]+\] succeeded", machine.log.read_text(errors="replace")))


def shards(code: str) -> Any:
    return Job.objects.filter(whole__run__code=code)


def exported(browser: Browser, code: str) -> bytes:
    browser.press(f"/runs/{code}/exports.json", {"format": "own_jsonl"})
    page = browser.wait(f"/runs/{code}.json", jobs_done)
    job = next(job for job in page["jobs"] if job["kind"] == "export")
    assert job["status"] == "done", job
    return bytes(browser.ask(job["file"]))


def of_one_task(data: dict[str, bytes], folder: Path) -> tuple[Run, bytes]:
    """What one task stores of files in the database, and its export."""
    for name, content in data.items():
        (folder / name).write_bytes(content)
    run = create_run(Run.Kind.IMPORT, "one task", token_store="database")
    imports.import_files(run, [folder / name for name in data])
    file = io.BytesIO()
    write_run(run, run.trajectories.all(), ExportOptions("own_jsonl"), file)
    return run, file.getvalue()


TOTALS = (
    "status", "n_trajectories", "n_steps", "n_rows", "n_tokens", "n_sampled", "n_rejected", "n_rewards", "reward_sum",
    "finding_counts", "bytes_done", "bytes_total", "format",
)


def assert_same(code: str, one: Run) -> None:
    """Totals, order and findings are those of one task, and the storage has the segments."""
    run = Run.objects.get(code=code)
    assert {name: getattr(run, name) for name in TOTALS} == {name: getattr(one, name) for name in TOTALS}
    columns = ("index", "external_id", "n_tokens", "n_findings", "worst_severity", "checks")
    assert list(run.trajectories.order_by("index").values_list(*columns)) == list(
        one.trajectories.order_by("index").values_list(*columns)
    )
    segments = set(run.token_segments.values_list("key", flat=True))
    assert len(segments) > 5 and segments <= {file.key for file in files.listed(folder_of(code))}
    assert not shards(code).exists()


def test_two_machines_share_large_work(
    machines: Machines, browser: Browser, bucket: str, settings: Any, tmp_path: Path, chat_server: str
) -> None:
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": bucket}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    machines.start_second()
    data = {"a.jsonl": lines(0, N), "b.jsonl": lines(N - 20, N + 10)}
    assert sum(map(len, data.values())) > 8 * PART_BYTES
    one, expected = of_one_task(data, tmp_path)

    first = imported(browser, data)
    page = browser.wait(f"/runs/{first}.json", has_ended)
    assert page["run"]["status"] == "done", page["run"]["error"]
    assert_same(first, one)
    # Celery writes that a task has succeeded when the run has ended already.
    for machine in (machines.worker, machines.second):
        wait_until(lambda machine=machine: tasks_done(machine) > 1, 240, "both machines say that they did parts")

    # A machine is lost in the middle of the next one. What both machines can do does not wait for its parts.
    second = imported(browser, data)
    wait_until(lambda: shards(second).filter(status="running").count() > 2, 240, "both machines read parts")
    machines.second.kill("worker")
    assert shards(second).filter(status__in=("queued", "running")).exists()
    browser.press(f"/runs/{first}/diagnose.json")
    assert exported(browser, first) == expected
    assert {job["status"] for job in browser.ask(f"/runs/{first}.json")["jobs"]} == {"done"}
    record(machines, browser, chat_server)
    browser.wait(f"/runs/{second}.json", has_ended)
    assert_same(second, one)
    assert_same(first, one)
    assert exported(browser, second) == expected


# -- the recorder


@pytest.fixture
def chat_server() -> Iterator[str]:
    """The address of a server that answers each chat with two tokens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = list(range(3 * len(asked["messages"])))
            choice = {
                "index": 0, "token_ids": [3, 4], "message": {"role": "assistant", "content": "x"},
                "finish_reason": "stop",
            }
            body = json.dumps({"prompt_token_ids": prompt, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def record(machines: Machines, browser: Browser, upstream: str) -> None:
    """A harness is recorded on one machine and seen on another one."""
    machine = machines.recorder
    command = ("python", "manage.py", "record", "--upstream", upstream, "--port", "0", "--json", "--run", "harness")
    process = machine.start("recorder", *command)
    wait_until(lambda: '"url"' in machine.log.read_text(), 240, "the recorder listens")
    said = next(json.loads(line) for line in machine.log.read_text().splitlines() if '"url"' in line)
    session = {"X-Session-Id": "s1"}
    messages = [{"role": "user", "content": "question"}]
    for _ in range(3):
        answer = requests.post(
            f"{said['url']}/chat/completions", json={"messages": messages}, headers=session, timeout=240
        )
        messages = [*messages, answer.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    page = browser.wait(f"/runs/{said['run']}.json", has_ended)
    assert (page["run"]["status"], page["run"]["trajectories"]) == ("done", 1), page["run"]
    trajectory = Run.objects.get(code=said["run"]).trajectories.get()
    assert (trajectory.external_id, trajectory.n_steps) == ("s1", 3)
    assert browser.ask(page["trajectories"][0]["url"].partition("?")[0])
