"""A server as `manage.py serve` starts it: its processes, its address, its answers."""

import http.client
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from tests.conftest import ROOT, wait_until
from tests.ports import HeldPort
from tests.samples.formats import GYM, changed, jsonl

LINK = re.compile(r"Rollout Inspector is ready: (http://127\.0\.0\.1:(\d+)/login\?token=\S+)")
PAGES = (
    "/", "/runs.json", "/help", "/help/findings", "/runs/new", "/import", "/tokenizers", "/templates", "/gallery",
    "/search", "/search?by=text&q=a", "/go?q=a", "/workers", "/audit", "/account", "/projects", "/tokens",
    "/api/v1/runs", "/api/v1/jobs", "/api/v1/openapi.json", "/robots.txt", "/metrics", "/nothing", "/runs/nothing",
    "/login",
)
"""Pages of every room, two of them that do not exist."""


def gym_lines(first: int, n: int) -> bytes:
    """A file of ``n`` trajectories, numbered from ``first``."""
    return jsonl(*[changed(GYM, "_ng_task_index", to=first + k) for k in range(n)])


class Visitor(requests.Session):
    """A browser that is logged in."""

    def __init__(self, link: str) -> None:
        super().__init__()
        self.url = link.partition("/login")[0]
        self.headers["Connection"] = "close"  # after an upload that was not read, the server closes it anyway
        assert self.get(link, timeout=60).status_code == 200
        self.ask("/import")  # gives the token against forged requests

    def ask(self, path: str) -> requests.Response:
        return self.get(self.url + path, timeout=60)

    def submit(self, path: str, **more: Any) -> requests.Response:
        headers = {"X-CSRFToken": self.cookies["csrftoken"], "Referer": self.url}
        return self.post(self.url + path, headers=headers, timeout=60, allow_redirects=False, **more)


def processes_of(data: Path, *words: bytes) -> list[int]:
    """Every living process that was started on this data folder, and whose command holds these words."""
    mark, pids = f"INSPECTOR_DATA={data}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                if mark in (entry / "environ").read_bytes().split(b"\0") and all(word in command for word in words):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return sorted(pids)


def environment(data: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    return {**kept, "INSPECTOR_DATA": str(data), "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(data: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A server that has said it is ready, with the file that holds what it said."""
    said = data.parent / "said"
    # Any port: if somebody takes it before the server does, that one tries the next.
    with said.open("w") as output, HeldPort() as port:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "serve", "--port", str(port.number), *options],
            cwd=ROOT,
            env=environment(data),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: bool(LINK.search(said.read_text())) or process.poll() is not None, 180, "the server is ready"
        )
        assert process.poll() is None, said.read_text()
        yield process, said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        wait_until(lambda: not processes_of(data), 60, "no process is left behind")


def get(url: str, cookie: str = "") -> http.client.HTTPResponse:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request("GET", f"{parts.path}?{parts.query}", headers={"Cookie": cookie} if cookie else {})
    return connection.getresponse()
