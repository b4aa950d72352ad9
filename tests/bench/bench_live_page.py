"""What open pages cost a run: throughput while nobody looks, and while browsers look at it. Ratios, printed.

The pages come from a web server in processes of its own, as in ``make run``. A browser that looks has the run's page
and a trajectory's open, and asks for their live parts as often as the templates tell htmx to.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client

from rollouts.launch import LaunchForm, launch, served_models
from rollouts.models import Run
from rollouts.tasks import launch as work
from tests.bench.engine_calls import forget, waited_for_a_core
from tests.conftest import ROOT, wait_until

pytestmark = [pytest.mark.bench, pytest.mark.sqlite_only, pytest.mark.django_db(transaction=True)]

BROWSERS = int(os.environ.get("BENCH_BROWSERS", "2"))
PAIRS = int(os.environ.get("BENCH_PAIRS", "5"))
PROMPTS, GROUP = 128, 4

LOOK = """
import http.client, json, select, sys, time
port, cookie, parts = json.loads(sys.argv[1])
due = [time.monotonic()] * len(parts)
answered, spent = 0, 0.0
connection = http.client.HTTPConnection("127.0.0.1", port)
while not select.select([sys.stdin], [], [], max(0.0, min(due) - time.monotonic()))[0]:
    place = due.index(min(due))
    address, target, seconds = parts[place]
    began = time.monotonic()
    connection.request("GET", address, headers={"Cookie": cookie, "HX-Request": "true", "HX-Target": target})
    answer = connection.getresponse()
    answer.read()
    assert answer.status in (200, 204), (address, answer.status)
    answered, spent = answered + 1, spent + time.monotonic() - began
    due[place] = time.monotonic() + seconds
print(json.dumps([answered, spent]))
"""
"""One browser; it ends when its standard input closes."""


@pytest.fixture(autouse=True)
def engines(tiny_tokenizer: Path) -> Iterator[None]:
    yield
    work.close_engines()


@pytest.fixture
def web_port(redis_url: str, transactional_db: None, tmp_path: Path) -> Iterator[int]:
    """A real web server over the test's own database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "inspector.settings",
        "DATABASE_URL": f"sqlite:///{connection.settings_dict['NAME']}",
        "REDIS_URL": redis_url,
        "INSPECTOR_DATA": str(settings.INSPECTOR_DATA),
    }
    subprocess.run(
        [sys.executable, "manage.py", "collectstatic", "--noinput", "-v0"], cwd=ROOT, env=environment, check=True
    )
    command = [sys.executable, "-m", "gunicorn", "-c", "python:inspector.gunicorn_conf", "inspector.wsgi:application"]
    with (tmp_path / "web.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--bind", f"127.0.0.1:{port}"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port), 60, "the web server answers")
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def looking(port: int, cookie: str, run: Run, browsers: int) -> Iterator[list[tuple[int, float]]]:
    """So many browsers look at a run; at the end the list holds what each got: (answers, seconds waited for them)."""
    trajectory = run.trajectories.order_by("index")[run.n_expected // 2]
    # Address, the element that htmx asks for, seconds between two questions.
    parts = [(f"/runs/{run.code}", "run-live", 1), (f"/runs/{run.code}", "run-list", 2)]
    parts.append((f"/trajectories/{trajectory.code}", "live", 2))
    seen: list[tuple[int, float]] = []
    command = [sys.executable, "-c", LOOK, json.dumps([port, cookie, parts])]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(browsers)
    ]
    try:
        yield seen
    finally:
        for process in processes:
            out, _ = process.communicate("")
            assert process.returncode == 0
            seen.append(tuple(json.loads(out)))


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_throughput_with_open_pages(
    engine: str, request: pytest.FixtureRequest, web_port: int, django_user_model: Any
) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    client = Client()
    client.force_login(django_user_model.objects.create_user("ada", password="a long password"))
    cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
    owner = work.engine_of(served_models()["demo"], engine)

    def rate(browsers: int, prompts: int, seed: int) -> tuple[float, float, list[tuple[int, float]]]:
        """Tokens a second, the same without the time the engine waited for a core, and what the browsers got."""
        run = launch(LaunchForm(engine=engine, prompts=prompts, group=GROUP, seed=seed), enqueue=False)
        owner.call(forget).result()
        before = owner.call(waited_for_a_core).result()
        with looking(web_port, cookie, run, browsers) as seen:
            began = time.perf_counter()
            work.work_on(run.pk)
            seconds = time.perf_counter() - began
        waited = owner.call(waited_for_a_core).result() - before
        run.refresh_from_db()
        assert run.status == "done" and not run.n_failed, run.error
        return run.n_sampled / seconds, run.n_sampled / (seconds - waited), seen

    rate(1, 16, 1)  # loads the engine and fills every cache
    ratios, quiet_ratios = [], []
    for pair in range(PAIRS):
        order = (0, BROWSERS) if pair % 2 else (BROWSERS, 0)
        rates = {browsers: rate(browsers, PROMPTS, 10 + pair) for browsers in order}
        alone, quiet_alone, _ = rates[0]
        watched, quiet_watched, seen = rates[BROWSERS]
        ratios.append(watched / alone)
        quiet_ratios.append(quiet_watched / quiet_alone)
        answers, waited = sum(n for n, _ in seen), sum(seconds for _, seconds in seen)
        print(
            f"\n{engine}: alone {alone:,.0f} tokens/s, with {BROWSERS} browsers {watched:,.0f} ({answers} answers, "
            f"{waited / max(1, answers) * 1000:.0f} ms each); ratio {ratios[-1]:.3f}, "
            f"without the engine's waiting for a core {quiet_ratios[-1]:.3f}"
        )
    for what, values in (("ratio", ratios), ("without the waiting for a core", quiet_ratios)):
        print(
            f"{engine}: {what} {median(values):.3f} "
            f"(median of {len(values)} pairs, {min(values):.3f} to {max(values):.3f}; target 0.98)"
        )
