"""Machines that share a database, Redis and a bucket, and nothing else.

A machine is a data folder of its own and processes that cannot open the folder of another one. Where the tests run as
root, its processes are root without the capability to pass over permissions, in a group of their own; the folders
belong to another user and to that group. Elsewhere the folders are merely apart.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.conftest import ROOT, database_url, wait_until
from tests.ports import HeldPort

FIRST_GROUP = 31_000
NOBODY = 65_534
DROPPED = "-dac_override,-dac_read_search,-fowner,-chown"


def is_apart() -> bool:
    """Whether the folders of machines can be kept unreadable for each other."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


class Machine:
    """One machine. Its folders go with it."""

    def __init__(self, number: int, environment: dict[str, str]) -> None:
        self.number = number
        self.folder = Path(tempfile.mkdtemp(prefix=f"inspector-machine-{number}-"))
        self.data = self.folder / "data"
        self.data.mkdir()
        (self.folder / "tmp").mkdir()
        self.log = self.folder / "log"
        self.log.touch()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("INSPECTOR_")},
            **environment,
            "INSPECTOR_DATA": str(self.data),
            "TMPDIR": str(self.folder / "tmp"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        self._prefix: list[str] = []
        if is_apart():
            group = FIRST_GROUP + number
            for path in (self.data, self.folder / "tmp", self.folder):
                os.chown(path, NOBODY, group)
                path.chmod(0o770)
            self._prefix = ["setpriv", f"--regid={group}", "--clear-groups", f"--bounding-set={DROPPED}"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process of the machine; what it prints goes to the log."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*self._prefix, *command], cwd=ROOT, env={**self.environment, **environment}, stdout=log, stderr=log,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """Kill a process and its children at once, as a lost machine does."""
        process = self.processes.pop(name)
        with_children = process.pid
        os.killpg(with_children, signal.SIGKILL)
        process.wait(60)

    def can_read(self, other: Machine) -> bool:
        """Whether a process of this machine can list the other one's data folder."""
        return subprocess.run([*self._prefix, "ls", str(other.data)], capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)
        shutil.rmtree(self.folder, ignore_errors=True)


class Browser(requests.Session):
    """A logged-in browser on the web server of a machine."""

    def __init__(self, url: str, name: str, cookie: str) -> None:
        super().__init__()
        self.url = url
        self.cookies.set(name, cookie)

    def ask(self, path: str, status: int = 200) -> Any:
        """GET; the value of a twin, or the bytes of a file."""
        answer = self.get(self.url + path, timeout=60)
        assert answer.status_code == status, (path, answer.status_code, answer.text[:1000])
        return answer.json() if path.partition("?")[0].endswith(".json") else answer.content

    def press(
        self, path: str, data: dict[str, Any] | None = None, least_refusal: int = 400, **more: Any
    ) -> requests.Response:
        """POST with the token against forged requests; a status from ``least_refusal`` on fails the test."""
        if "csrftoken" not in self.cookies:
            self.get(f"{self.url}/import", timeout=60)
        headers = {"X-CSRFToken": self.cookies["csrftoken"], "Referer": self.url}
        answer = self.post(self.url + path, data, headers=headers, timeout=60, allow_redirects=False, **more)
        assert answer.status_code < least_refusal, (path, answer.status_code, answer.text[-1500:])
        return answer

    def wait(self, path: str, condition: Callable[[Any], bool], seconds: float = 240) -> Any:
        """Ask for a twin until it meets the condition."""
        value: Any = None

        def is_so() -> bool:
            nonlocal value
            value = self.ask(path)
            return condition(value)

        wait_until(is_so, seconds, lambda: f"{path} says something else than {str(value)[:3000]}")
        return value


class Machines:
    """A web server, a worker of jobs and a worker of the demo model, each on a machine of its own.

    Two more machines have no process yet: one for a recorder, one for a second worker of jobs.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.web, self.worker, self.engine, self.recorder, self.second = (Machine(n, environment) for n in range(5))
        self._port = HeldPort()
        self.url = self._port.url

    @property
    def all(self) -> tuple[Machine, ...]:
        return self.web, self.worker, self.engine, self.recorder, self.second

    def start_web(self) -> None:
        self.web.start("web", "inspector/server/start", "web", BIND=self.url.removeprefix("http://"))

    def start_worker(self) -> None:
        self.worker.start("worker", "inspector/server/start", "worker", INSPECTOR_WORKERS="1")

    def start_second(self) -> None:
        """Start a second worker of jobs, and wait until it takes some."""
        self.second.start("worker", "inspector/server/start", "worker", INSPECTOR_WORKERS="1")
        wait_until(lambda: " ready." in self.second.log.read_text(), 240, "the second worker is ready")

    def start_engine(self) -> None:
        self.engine.start("engine", "inspector/server/start", "engine", "demo")

    def is_up(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=60).status_code == 200
        except requests.RequestException:
            return False

    def close(self) -> None:
        for one in self.all:
            one.close()
        self._port.close()

    def logs(self) -> str:
        return "\n".join(f"--- machine {one.number}\n{one.log.read_text(errors='replace')[-3000:]}" for one in self.all)


@pytest.fixture
def machine_environment() -> dict[str, str]:
    """What a module of tests sets on every machine."""
    return {}


@pytest.fixture
def machines(
    transactional_db: None, live_redis: str, bucket: str, settings: Any, machine_environment: dict[str, str]
) -> Iterator[Machines]:
    """Machines that run. What they printed is shown when the test fails."""
    from django.core.cache import cache

    from inspector.server.health import heartbeat_key

    found = Machines({
        "DATABASE_URL": database_url(), "REDIS_URL": live_redis, "INSPECTOR_FILES": bucket,
        "SECRET_KEY": settings.SECRET_KEY, "DJANGO_SETTINGS_MODULE": "inspector.settings", "OMP_NUM_THREADS": "1",
        "ALLOWED_HOSTS": "127.0.0.1", "HF_HUB_OFFLINE": "1", **machine_environment,
    })
    try:
        found.start_web()
        found.start_worker()
        found.start_engine()
        wait_until(found.is_up, 240, "the web server answers")
        for queue in ("default", "engine.demo"):
            wait_until(lambda queue=queue: cache.get(heartbeat_key(queue)) is not None, 240, f"{queue} is served")
        yield found
    finally:
        print(found.logs())  # pytest shows it when the test fails
        found.close()


@pytest.fixture
def browser(machines: Machines, django_user_model: Any, settings: Any) -> Browser:
    """Somebody who may do everything."""
    from django.test import Client

    client = Client()
    client.force_login(django_user_model.objects.create_superuser("ada"))
    name = settings.SESSION_COOKIE_NAME
    return Browser(machines.url, name, client.cookies[name].value)
