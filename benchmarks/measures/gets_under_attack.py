"""Measure how long pages take while a server is attacked.

    python -m benchmarks.measures.gets_under_attack --attack pushes --seconds 20

Starts ``manage.py serve`` on a data folder of its own with a run of 200 trajectories. Readers get pages, each request
over a new connection, first while the server has nothing else to do and then while the attack runs. Prints both, and
the largest memory of the web server. ``--attack module:function`` names an attack of your own (:data:`Attack`).
With ``--team`` the server runs in team mode, and the attack is that of a member of another project. What the readers'
project holds must be the same afterwards, and the attacker must see nothing of it.
"""

import argparse
import http.client
import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.processes import family, megabytes, sums
from rollout_inspector.client.client import Client

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
TIMEOUT_SECONDS = 30.0
SETTLE_SECONDS = 4.0
"""How long an attack runs before the readers start."""
READERS = 3
PAUSE_SECONDS = 0.05
"""Between two requests of a reader."""


@dataclass(frozen=True)
class Server:
    """A running server with a run on it. It can be sent to another process."""

    host: str
    port: int
    process: int
    """The process id of ``manage.py serve``."""
    data: Path
    cookie: str
    """Of a member who is logged in."""
    token: str
    """An API key."""
    run: str
    """Code of a run with 200 trajectories, which can be pushed to."""
    pages: tuple[str, ...]

    def get(self, path: str) -> int:
        """Returns the status of a page that was read to its end. Raises ``OSError`` and ``HTTPException``."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", path, headers={"Cookie": self.cookie})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def post(self, path: str, body: bytes, headers: dict[str, str], timeout: float = 300.0) -> tuple[int, bytes]:
        """Returns status and body of the answer. Raises ``OSError`` and ``HTTPException``."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def push(self, body: bytes, query: str = "") -> tuple[int, bytes]:
        """Push a body as a trainer does. Returns status and body of the answer."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/x-ndjson"}
        return self.post(f"/api/runs/{self.run}/trajectories{query}", body, headers)


Attack = Callable[[Server, Event], None]
"""Attacks a server until the event is set. It runs in a process of its own."""


@contextmanager
def serving(**environment: str) -> Iterator[Server]:
    """A server with a run on it. ``environment`` are further settings of the server."""
    with tempfile.TemporaryDirectory(prefix="inspector-attack-") as folder:
        data, said = Path(folder) / "data", Path(folder) / "said"
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        settings = {**kept, "INSPECTOR_DATA": str(data), "HF_HUB_OFFLINE": "1", **environment}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with said.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "manage.py", "serve", "--port", str(port)],
                cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )
        try:
            yield _ready(process, said, data, settings)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[Any], said: Path, data: Path, settings: dict[str, str]) -> Server:
    until = time.monotonic() + START_SECONDS
    while not (link := re.search(r"http://([\d.]+):(\d+)(/login\S*) ?", said.read_text())):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"The server does not start. It said:\n{said.read_text()}")
        time.sleep(0.1)
    host, port = link[1], int(link[2])
    if not link[3].startswith("/login?"):  # in team mode each member logs in with a name
        return Server(host, port, process.pid, data, "", "", "", ())
    cookie = _login(host, port, link[3])
    printed = subprocess.run(
        [sys.executable, "manage.py", "api_token", "attack"],
        cwd=ROOT, env=settings, capture_output=True, text=True, check=True,
    ).stdout
    token = re.search(r"\bri_\S+", printed)
    if token is None:
        raise RuntimeError(f"The command api_token printed no token: {printed}")
    client = Client(f"http://{host}:{port}", token[0])
    run = client.create_run("under attack")
    client.push(_calls(200))
    server = Server(host, port, process.pid, data, cookie, token[0], run, ())
    return _with_pages(server)


def _with_pages(server: Server) -> Server:
    """The same with the addresses that readers get."""
    run = server.run
    found = sorted(set(re.findall(rb"/trajectories/[0-9a-z]+", _body(server, f"/runs/{run}"))))
    one = found[0].decode()
    pages = ("/", "/runs.json", f"/runs/{run}", one, f"{one}/mask", f"{one}/record", "/tokenizers", "/help")
    return replace(server, pages=pages)


_MEMBERS = """
import json, django; django.setup()
from django.contrib.auth import get_user_model
from inspector.web.login import make_token
from rollouts.store.models import ApiToken, Membership, Project, Role
from rollouts.store.people.shares import create_api_key
made = {}
for name in ("reader", "attacker"):
    project = Project.objects.create(name=f"project of the {name}")
    user = get_user_model().objects.create_user(name)
    Membership.objects.create(project=project, user=user, role=Role.ADMIN)
    made[name] = make_token(name), create_api_key(user, name, project=project, scopes=list(ApiToken.Scope))[1]
print(json.dumps(made))
"""


def as_members(server: Server) -> tuple[Server, Server]:
    """The server as a reader and as an attacker know it: admins of two projects, each with a run of its own."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    settings = {**kept, "INSPECTOR_DATA": str(server.data), "INSPECTOR_TEAM": "1",
                "DJANGO_SETTINGS_MODULE": "inspector.settings"}
    said = subprocess.run([sys.executable, "-c", _MEMBERS], cwd=ROOT, env=settings, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(said.stderr)
    found = []
    for link, token in json.loads(said.stdout.splitlines()[-1]).values():
        client = Client(f"http://{server.host}:{server.port}", token)
        run = client.create_run("of a member")
        client.push(_calls(200))
        cookie = _login(server.host, server.port, f"/login?token={link}")
        found.append(_with_pages(replace(server, cookie=cookie, token=token, run=run)))
    return found[0], found[1]


def _login(host: str, port: int, link: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    connection.request("GET", link)
    cookies = connection.getresponse().headers.get_all("Set-Cookie") or []
    connection.close()
    return "; ".join(one.partition(";")[0] for one in cookies)


def held_by(server: Server) -> list[tuple[str, bytes]]:
    """What a reader gets at the pages of the run, to be compared."""
    return [(page, _body(server, f"{page}.json")) for page in server.pages if server.run in page or "/traj" in page]


def leaks(reader: Server, attacker: Server) -> list[str]:
    """Addresses of the reader's run that the attacker is not refused: pages, twins, pushes, deletion."""
    pages = [page + end for page, _ in held_by(reader) for end in ("", ".json")]
    seen = [f"GET {page}" for page in pages if attacker.get(page) != 404]
    foreign = replace(attacker, run=reader.run)
    form = {"Cookie": f"{attacker.cookie}; csrftoken={'c' * 32}", "X-CSRFToken": "c" * 32}
    answers = {"push": foreign.push(b"{}")[0]}
    for verb in ("delete", "cancel"):
        answers[verb] = attacker.post(f"/runs/{reader.run}/{verb}", b"", form)[0]
    return seen + [f"{verb}: {status}" for verb, status in answers.items() if status != 404]


def _body(server: Server, path: str) -> bytes:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=TIMEOUT_SECONDS)
    connection.request("GET", path, headers={"Cookie": server.cookie})
    return connection.getresponse().read()


def _calls(n: int) -> Iterator[dict[str, Any]]:
    """Three calls for each of ``n`` sessions."""
    ids = random.Random(1)
    for session in range(n):
        stream: list[int] = []
        for _ in range(3):
            stream += [ids.randrange(1000) for _ in range(200)]
            completion = [ids.randrange(1000) for _ in range(100)]
            choice = {"index": 0, "token_ids": completion, "finish_reason": "stop",
                      "message": {"role": "assistant", "content": "x"}}
            request = {"model": "m", "messages": [{"role": "user", "content": f"question {session}"}]}
            yield {"session_id": f"s{session}", "request": request,
                   "response": {"prompt_token_ids": list(stream), "choices": [choice]}}
            stream += completion


# -- readers


@dataclass
class Waits:
    """What readers saw in one stretch of time."""

    seconds: dict[str, list[float]]
    """Of each answered request, by page."""
    failed: Counter[str]
    """Requests that were not answered with 200, by what came instead."""
    megabytes: Counter[str]
    """The largest resident memory of the processes of the server, by what they are."""

    def quantile(self, share: float, page: str | None = None) -> float:
        """Seconds that a share of the requests stay below; 0 when none was answered."""
        held = sorted(self.seconds[page] if page else [one for some in self.seconds.values() for one in some])
        return held[min(int(share * len(held)), len(held) - 1)] if held else 0.0

    @property
    def n(self) -> int:
        return sum(map(len, self.seconds.values()))


def read_pages(server: Server, seconds: float) -> Waits:
    """Get the pages of a server again and again for so long."""
    waits = Waits(defaultdict(list), Counter(), Counter())
    until = time.monotonic() + seconds

    def reader(first: int) -> None:
        n = first
        while time.monotonic() < until:
            page = server.pages[n % len(server.pages)]
            n += 1
            begun = time.perf_counter()
            try:
                status = server.get(page)
            except (OSError, http.client.HTTPException) as error:
                waits.failed[type(error).__name__] += 1
            else:
                if status == 200:
                    waits.seconds[page].append(time.perf_counter() - begun)
                else:
                    waits.failed[f"HTTP {status}"] += 1
            time.sleep(PAUSE_SECONDS)

    threads = [threading.Thread(target=reader, args=(n * 3,)) for n in range(READERS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        waits.megabytes |= sums(megabytes, family(server.process, "server"))
        time.sleep(0.2)
    return waits


def measure(server: Server, attack: str, seconds: float, attacker_is: Server | None = None) -> tuple[Waits, Waits]:
    """What readers see before and while an attack runs. ``attack``: a name of ``ATTACKS``, or ``module:function``.

    ``attacker_is``: the server as the attacker knows it; None = as the readers do.
    """
    read_pages(server, 3.0)  # what a first request loads
    idle = read_pages(server, seconds)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    attacker = context.Process(target=_run_attack, args=(ATTACKS.get(attack, attack), attacker_is or server, stop))
    attacker.start()
    try:
        time.sleep(SETTLE_SECONDS)
        return idle, read_pages(server, seconds)
    finally:
        stop.set()
        attacker.join(10)
        attacker.kill()


def _run_attack(name: str, server: Server, stop: Event) -> None:
    os.nice(19)  # attackers are other machines: making a body must not take time from the server
    module, _, function = name.partition(":")
    attack: Attack = getattr(importlib.import_module(module), function)
    attack(server, stop)


def nothing(server: Server, stop: Event) -> None:
    """Attacks nothing: how much two measurements differ on this machine."""
    stop.wait()


ATTACKS = {
    "nothing": "benchmarks.measures.gets_under_attack:nothing",
    "pushes": "tests.attack.hostile_bodies:push_them",
    "tokenizers": "tests.attack.all_at_once:tokenizers",
    "checks": "tests.attack.all_at_once:checks",
    "exports": "tests.attack.all_at_once:exports",
    "all": "tests.attack.all_at_once:everything",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", default="nothing", help=f"{', '.join(ATTACKS)}, or module:function")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long readers read, before and during")
    parser.add_argument("--team", action="store_true", help="in team mode, attacked by a member of another project")
    asked = parser.parse_args()
    faults: list[str] = []
    with serving(**{"INSPECTOR_TEAM": "1"} if asked.team else {}) as server:
        attacker = None
        if asked.team:
            server, attacker = as_members(server)
            held = held_by(server)
        idle, attacked = measure(server, asked.attack, asked.seconds, attacker)
        if attacker is not None:
            faults = leaks(server, attacker)
            faults += [
                f"changed: {page}" for (page, was), (_, now) in zip(held, held_by(server), strict=True) if was != now
            ]
    print(f"{'page':34} {'idle p95':>9} {'attacked':>9} {'idle max':>9} {'attacked':>9}")
    for page in server.pages:
        name = page if len(page) < 34 else f"...{page[-31:]}"
        figures = [waits.quantile(share, page) for share in (0.95, 1.0) for waits in (idle, attacked)]
        print(f"{name:34} " + " ".join(f"{figure * 1000:6.0f} ms" for figure in figures))
    before, after = idle.quantile(0.95), attacked.quantile(0.95)
    print(
        f"all: p95 {before * 1000:.0f} ms idle, {after * 1000:.0f} ms attacked: {after / max(before, 1e-9):.1f} times"
    )
    if asked.team:
        print(f"of the readers' project: {', '.join(faults) or 'nothing was seen by the attacker, nothing changed'}")
    print(f"longest {idle.quantile(1.0):.2f} s idle, {attacked.quantile(1.0):.2f} s attacked")
    print(f"requests {idle.n} idle, {attacked.n} attacked; not answered {dict(idle.failed)}, {dict(attacked.failed)}")
    for name, most in sorted(attacked.megabytes.items()):
        print(f"{name}: {idle.megabytes[name]:.0f} MB idle, {most:.0f} MB attacked")


if __name__ == "__main__":
    main()
