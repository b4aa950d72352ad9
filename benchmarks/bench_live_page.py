"""What open pages cost a run: throughput while nobody looks, and while browsers look at it. Ratios, printed.

The pages come from a web server in processes of its own, as in ``make run``. A browser that looks has the run's page
and a trajectory's open, and asks for their live parts as the pages tell htmx to.

Where others use the machine, throughput says little. What the pages take is the processor time of the web server, and
it is printed for each second and browser; what they add to the engine's own work is the third ratio, of the processor
seconds of its thread. Neither shows what the engine would wait for the web server on a machine without a free core.
"""

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
from typing import Any, NamedTuple

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client

from benchmarks.engine_calls import computed, forget, waited_for_a_core
from benchmarks.processes import family, processor_seconds, sums
from rollouts.jobs.launch import LaunchSettings, launch, served_models
from rollouts.jobs.warm_engines import engine_of
from rollouts.store.models import Run
from rollouts.worker import run_rollouts
from tests.conftest import ROOT, wait_until
from tests.people import make_member

pytestmark = [
    pytest.mark.bench,
    pytest.mark.sqlite_only,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("engines"),
]

BROWSERS = int(os.environ.get("BENCH_BROWSERS", "2"))
PAIRS = int(os.environ.get("BENCH_PAIRS", "5"))
PROMPTS, GROUP = 128, 4

RATIOS = ("ratio", "without the waiting for a core", "by the engine's processor seconds")


class Spent(NamedTuple):
    seconds: float
    waited: float
    """That the engine's thread stood ready and got no core."""
    computed: float
    """Processor seconds of the engine's thread."""
    web: float
    """Processor seconds of the web server."""


class Rate(NamedTuple):
    """Of one run: tokens a second, without the waiting for a core, and for each second that the engine computed."""

    raw: float
    quiet: float
    computed: float
    used: Spent
    seen: list[tuple[int, float]]
    """What each browser got."""


LOOK = """
import html, http.client, json, re, select, sys, time
port, cookie, parts = json.loads(sys.argv[1])
connection = http.client.HTTPConnection("127.0.0.1", port)
answered, spent = 0, 0.0

def ask(address, target):
    global answered, spent
    began = time.monotonic()
    headers = {"Cookie": cookie, **({"HX-Request": "true", "HX-Target": target} if target else {})}
    connection.request("GET", address, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    assert answer.status in (200, 204), (address, answer.status)
    answered, spent = answered + 1, spent + time.monotonic() - began
    return answer, body

def asks_again(body, part):
    found = re.search(f'<div id="{part}"[^>]* hx-get="([^"]+)" hx-trigger="every ([0-9]+)s"', body)
    return (html.unescape(found[1]), float(found[2])) if found else None

def look(part, address):
    place = asks_again(ask(address, "")[1], part)
    return [part, *place, time.monotonic() + place[1]]

looks = [look(*part) for part in parts]
print(flush=True)
while True:
    due = min((one[3] for one in looks), default=time.monotonic() + 60)
    if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        break
    if not looks:
        continue
    one = min(looks, key=lambda one: one[3])
    answer, body = ask(one[1], one[0])
    if answer.status == 200:
        again = asks_again(body, one[0])
        if again:
            one[1:3] = again
        else:
            looks.remove(one)
    one[3] = time.monotonic() + one[2]
print(json.dumps([answered, spent]))
"""
"""One browser: it asks what the pages tell it to ask, until its standard input closes. What has ended is
not asked for again."""


@pytest.fixture
def web(redis_url: str, transactional_db: None, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A real web server over the test's own database: its port and the number of its first process."""
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
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "-c",
        "python:inspector.server.gunicorn_conf",
        "inspector.wsgi:application",
    ]
    with (tmp_path / "web.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--bind", f"127.0.0.1:{port}"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _answers(port), 60, "the web server answers")
        yield port, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/login", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def warm(port: int, cookie: str) -> None:
    """Each process of the web server has made every template once: what is measured is looking, not starting."""
    run = Run.objects.latest("pk")
    for _ in range(24):
        for page in (f"/runs/{run.code}", f"/trajectories/{run.trajectories.all()[0].code}"):
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{page}", headers={"Cookie": cookie})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()


@contextmanager
def looking(port: int, cookie: str, run: Run, browsers: int) -> Iterator[list[tuple[int, float]]]:
    """So many browsers look at a run; at the end the list holds what each got: (answers, seconds waited for them)."""
    trajectory = run.trajectories.order_by("index")[run.n_expected // 2]
    parts = [("run-live", f"/runs/{run.code}"), ("live", f"/trajectories/{trajectory.code}")]
    seen: list[tuple[int, float]] = []
    command = [sys.executable, "-c", LOOK, json.dumps([port, cookie, parts])]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(browsers)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # it has opened its pages
    try:
        yield seen
    finally:
        for process in processes:
            out, _ = process.communicate("")
            assert process.returncode == 0
            seen.append(tuple(json.loads(out)))


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_throughput_with_open_pages(
    engine: str, request: pytest.FixtureRequest, web: tuple[int, int], django_user_model: Any
) -> None:
    if engine == "vllm":
        request.getfixturevalue("vllm_available")
    port, web_pid = web
    client = Client()
    client.force_login(make_member("ada", password="a long password"))
    cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
    owner = engine_of(served_models()["demo"], engine)

    def spent() -> Spent:
        server = sums(processor_seconds, family(web_pid, "web")).total()
        asked = owner.call(waited_for_a_core).result(), owner.call(computed).result()
        return Spent(time.perf_counter(), *asked, server)

    def rate(browsers: int, prompts: int, seed: int) -> Rate:
        run = launch(LaunchSettings(engine=engine, prompts=prompts, group=GROUP, seed=seed), enqueue=False)
        owner.call(forget).result()
        with looking(port, cookie, run, browsers) as seen:
            before = spent()
            run_rollouts.work_on(run.pk)
            after = spent()
        run.refresh_from_db()
        assert run.status == "done" and not run.n_failed, run.error
        used = Spent(*(b - a for a, b in zip(before, after, strict=True)))
        return Rate(
            run.n_sampled / used.seconds, run.n_sampled / (used.seconds - used.waited), run.n_sampled / used.computed,
            used, seen,
        )

    rate(1, 16, 1)  # loads the engine and fills every cache
    warm(port, cookie)
    ratios: dict[str, list[float]] = {name: [] for name in RATIOS}
    shares = []
    for pair in range(PAIRS):
        order = (0, BROWSERS) if pair % 2 else (BROWSERS, 0)
        rates = {browsers: rate(browsers, PROMPTS, 10 + pair) for browsers in order}
        alone, watched = rates[0], rates[BROWSERS]
        for values, one, other in zip(ratios.values(), watched[:3], alone[:3], strict=True):
            values.append(one / other)
        answers, waited = sum(n for n, _ in watched.seen), sum(seconds for _, seconds in watched.seen)
        shares.append(watched.used.web / watched.used.seconds / BROWSERS)
        print(
            f"\n{engine}: alone {alone.raw:,.0f} tokens/s, with {BROWSERS} browsers {watched.raw:,.0f} ({answers} "
            f"answers, {waited / max(1, answers) * 1000:.0f} ms each); the web server computed "
            f"{watched.used.web:.2f} s in {watched.used.seconds:.2f} ({alone.used.web:.2f} while nobody looked), "
            f"{shares[-1] * 1000:.0f} ms for each second and browser; "
            + ", ".join(f"{name} {values[-1]:.3f}" for name, values in ratios.items())
        )
    print(
        f"{engine}: the web server computed {median(shares) * 1000:.0f} ms for each second and browser "
        f"(median of {len(shares)}, {min(shares) * 1000:.0f} to {max(shares) * 1000:.0f})"
    )
    for what, values in ratios.items():
        print(
            f"{engine}: {what} {median(values):.3f} "
            f"(median of {len(values)} pairs, {min(values):.3f} to {max(values):.3f}; target 0.98)"
        )
