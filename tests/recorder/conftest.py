"""`manage.py record` as a process of its own, on the database of the test."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run, start_run
from tests.conftest import ROOT, database_url


@pytest.fixture
def run(transactional_db: None) -> Run:
    run = create_run(Run.Kind.IMPORT, "recorded", engine="recorder")
    start_run(run)
    return run


Start = Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]


@pytest.fixture
def start(transactional_db: None, settings: Any) -> Iterator[Start]:
    """Start `manage.py record` on the test's database; gives the process and what it says first."""
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "inspector.settings", "DATABASE_URL": database_url(),
        "INSPECTOR_DATA": str(settings.INSPECTOR_DATA), "OMP_NUM_THREADS": "1",
    }
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
        process.wait(60)


def ask(url: str, body: Any, session: str = "") -> Any:
    headers = {"Content-Type": "application/json", **({"X-Session-Id": session} if session else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def stop(process: subprocess.Popen[str]) -> dict[str, Any]:
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return dict(json.loads(out))
