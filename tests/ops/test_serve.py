"""`manage.py serve` as a person meets it: real processes, a real port, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inspector.server.paths import AlreadyRunning, ServerLock, running_url
from inspector.server.supervisor import Child, Supervisor
from tests.conftest import ROOT, wait_until
from tests.ports import HeldPort
from tests.samples.server import LINK, environment, get, processes_of, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes through /proc")


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """One data folder for all starts of this file, so that only the first one migrates."""
    with tempfile.TemporaryDirectory(prefix="inspector-serve-") as folder:
        yield Path(folder) / "data"


def test_it_serves_heals_and_leaves_nothing_on_sigterm(data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(data, "--port", str(port)) as (process, said):
            found = LINK.search(said.read_text())
            assert found
            assert int(found[2]) != port
            assert f"Port {port} is taken by another program" in said.read_text()
            url = f"http://127.0.0.1:{found[2]}"

            answer = get(found[1])
            assert (answer.status, answer.headers["Location"]) == (302, "/")
            assert get(found[1]).status == 403  # another browser: the link has been used
            wait_until(lambda: get(f"{url}/health").status == 200, 180, "both workers are well")
            nice = {
                name: {
                    os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0)
                    for pid in processes_of(data)
                    if name in Path(f"/proc/{pid}/cmdline").read_bytes()
                }
                for name in (b"gunicorn", b"\0default-")
            }
            assert nice == {b"gunicorn": {0}, b"\0default-": {5}}  # pages go first

            # A second server on the same data is refused, with the address of the first.
            second = subprocess.run(
                [sys.executable, "manage.py", "serve"],
                cwd=ROOT,
                env=environment(data),
                capture_output=True,
                text=True,
                check=False,
            )
            assert second.returncode == 1
            assert f"already runs on this data folder, at {url}" in second.stderr
            link = subprocess.run(
                [sys.executable, "manage.py", "login_link"],
                cwd=ROOT,
                env=environment(data),
                capture_output=True,
                text=True,
                check=True,
            )
            assert get(link.stdout.strip()).status == 302

            # The worker that is killed is started again, and that is said.
            victims = [pid for pid in processes_of(data) if b"engine.demo" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(victims[0], signal.SIGKILL)
            wait_until(lambda: "The engine worker ended unexpectedly" in said.read_text(), 60, "the death is noticed")
            wait_until(
                lambda: any(
                    pid not in victims and b"engine.demo" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    for pid in processes_of(data)
                ),
                60,
                "the worker is back",
            )
            assert get(f"{url}/health").status in (200, 503)

            process.send_signal(signal.SIGTERM)
            assert process.wait(90) == 0
        assert not (data / "run" / "redis.sock").exists()
        logs = "".join(path.read_text(errors="replace") for path in (data / "logs").iterdir())
        assert found[1].rpartition("=")[2] not in logs


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT], [signal.SIGHUP]])
def test_it_leaves_nothing_however_it_ends(data: Path, signals: list[signal.Signals]) -> None:
    # A closed terminal ends it as SIGTERM does, which is tested with workers above.
    options = ["--no-workers"] if signals == [signal.SIGHUP] else []
    with serving(data, *options) as (process, said):
        assert len(processes_of(data)) >= (2 if options else 4)
        process.send_signal(signals[0])
        for signum in signals[1:]:
            wait_until(lambda: "Stopping" in said.read_text(), 60, "the first signal is heard")
            process.send_signal(signum)
        process.wait(90)


def test_a_killed_make_takes_its_server_along(data: Path) -> None:
    said = data.parent / "made"
    with said.open("w") as output, HeldPort() as port:
        # A shell stands for make: what counts is the parent's death and the variable that make sets.
        parent = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                f'"{sys.executable}" manage.py serve --no-workers --port {port.number}; true',
            ],
            cwd=ROOT,
            env={**environment(data), "MAKELEVEL": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    wait_until(lambda: bool(LINK.search(said.read_text())), 180, "the server is ready")
    parent.kill()
    parent.wait(60)
    wait_until(lambda: not processes_of(data), 60, "no process is left behind")


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_that_is_none_is_a_sentence(data: Path, port: str) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "serve", "--port", port],
        cwd=ROOT,
        env=environment(data),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{port} is no port" in done.stderr


def test_only_one_holds_the_lock(tmp_path: Path) -> None:
    first = ServerLock(tmp_path)
    first.take()
    first.announce("http://127.0.0.1:1")
    assert running_url(tmp_path) == "http://127.0.0.1:1"
    with pytest.raises(AlreadyRunning, match=r"at http://127\.0\.0\.1:1"):
        ServerLock(tmp_path).take()
    first.release()
    assert running_url(tmp_path) is None


def test_a_child_that_keeps_dying_is_started_ever_more_slowly(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    child = Child("The witness", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    supervisor.start(child)
    pauses = []
    for _ in range(3):
        assert child.process
        child.process.wait(60)
        before = time.monotonic()
        supervisor.watch_once()
        assert child.start_at is not None
        pauses.append((child.start_at - time.monotonic(), child.start_at - before))
        child.start()
    supervisor.stop()
    assert all(least <= pause <= most for pause, (least, most) in zip((1, 2, 4), pauses, strict=True))
    assert "The witness ended unexpectedly (exit status 3)" in said[0]


def test_a_child_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); time.sleep(600)"
    )
    bystander = subprocess.Popen(["sleep", "600"])
    supervisor = Supervisor(print)
    child = Child("The stubborn", [sys.executable, "-c", code], tmp_path / "log", grace_s=0.2)
    supervisor.start(child)
    wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"), 60, "it has started its own child")
    grandchild = int((tmp_path / "log").read_text())
    supervisor.stop()
    assert not child.is_alive
    assert not Path(f"/proc/{grandchild}").exists()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait(60)
