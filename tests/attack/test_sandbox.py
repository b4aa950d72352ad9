"""A template that escaped from Jinja finds nothing: no file, no network, no process, no memory but its own (M12)."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inspector.server.system_checks import check_confinement
from rollout_inspector.text import confinement
from rollout_inspector.text.confinement import missing

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "rollout_inspector" / "text" / "chat_templates" / "sandbox" / "worker" / "__main__.py"

STAND_IN = """
import ctypes, encodings.idna, fcntl, os, resource, runpy, socket, subprocess, sys, threading
from pathlib import Path
worker, user, library = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
main = runpy.run_path(str(worker))
main["load"](main["NAME"], worker.with_name("__init__.py"))
confinement = main["load"]("confinement", worker.parents[3] / "confinement.py")
confinement.LIBRARY = library
serving = __import__(main["NAME"] + ".serving").serving
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"x86_64": {"fork": 57, "ptrace": 101, "process_vm_readv": 310, "clone3": 435, "io_uring_setup": 425},
           "aarch64": {"fork": 220, "ptrace": 117, "process_vm_readv": 270, "clone3": 435, "io_uring_setup": 425}}
def call(name, *arguments):
    if libc.syscall(numbers[os.uname().machine][name], *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
serving.render_plain.__globals__["PLAIN"].globals["escaped"] = lambda code: str(eval(code, globals()))
if user:  # who may not read where Python lies
    for name in serving._LOADED_LATE:
        __import__(name)
    os.setgroups([]); os.setgid(user); os.setuid(user)
serving.main(400_000_000, confinement.confine)
"""
"""The program of the sandbox, and a function that runs any Python as an escaped template could."""


class Escaped:
    """A worker of the sandbox whose templates have escaped."""

    def __init__(self, user: int = 0, library: str = confinement.LIBRARY) -> None:
        arguments = [sys.executable, "-I", "-c", STAND_IN, str(WORKER), str(user), library]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": ""})
        self.ready = self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        (n,) = struct.unpack("<I", self.process.stdout.read(4))
        return json.loads(self.process.stdout.read(n))

    def render(self, template: str) -> dict[str, Any]:
        job = {"variables": {}, "lines": False, "renders": []}
        request = {"template": template, "output_chars": 10**6, "cpu_seconds": 2, "jobs": [job]}
        data = json.dumps(request).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack("<I", len(data)) + data)
        self.process.stdin.flush()
        return dict(self.read())

    def run(self, code: str) -> str:
        """What an expression of Python gives or raises, computed in the middle of a render."""
        answer = self.render("{{ escaped(" + json.dumps(code) + ") }}")
        return str(answer.get("error", answer.get("text")))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


NOBODY = 65534


USERS = {"as this user": 0} | ({"without the rights of root": NOBODY} if os.geteuid() == 0 else {})


@pytest.fixture(scope="module", params=USERS.values(), ids=USERS)
def escaped(request: pytest.FixtureRequest) -> Iterator[Escaped]:
    worker = Escaped(user=request.param)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A secret, a port and a socket of the site, all of which this test itself can use."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "secret_key").write_text("very secret")
    os.chmod(folder, 0o777)
    with socket.create_server(("127.0.0.1", 0)) as site, socket.socket(socket.AF_UNIX) as redis:
        redis.bind(str(folder / "redis.sock"))
        redis.listen()
        yield {"data": str(folder), "port": site.getsockname()[1], "parent": os.getpid()}


ATTACKS = {
    "read the environment of the parent": "open('/proc/{parent}/environ', 'rb').read()",
    "read the memory of the parent": "open('/proc/{parent}/mem', 'rb')",
    "copy the memory of the parent": "call('process_vm_readv', {parent}, 0, 0, 0, 0, 0)",
    "trace the parent": "call('ptrace', 16, {parent}, 0, 0)",
    "limit the parent": "resource.prlimit({parent}, resource.RLIMIT_CPU, (1, 1))",
    "signal the parent": "os.kill({parent}, 0)",
    "signal the group": "os.kill(0, 0)",
    "read the secret key": "open('{data}/secret_key').read()",
    "see that a file is there": "os.stat('{data}/secret_key')",
    "list a folder": "os.listdir('{data}')",
    "go to a folder": "os.chdir('{data}')",
    "write a file": "open('{data}/new', 'w')",
    "make a link": "os.symlink('{data}/secret_key', '{data}/link')",
    "make a hard link": "os.link('{data}/secret_key', '{data}/link')",
    "remove a file": "os.remove('{data}/secret_key')",
    "change the mode of a file": "os.chmod('{data}/secret_key', 0o777)",
    "make a file in memory": "os.memfd_create('x')",
    "connect to a port": "socket.create_connection(('127.0.0.1', {port}))",
    "connect to a local socket": "socket.socket(socket.AF_UNIX).connect('{data}/redis.sock')",
    "make a pair of sockets": "socket.socketpair()",
    "listen": "socket.create_server(('127.0.0.1', 0))",
    "fork": "os.fork()",
    "fork by number": "call('fork', 17, 0, 0, 0, 0)",
    "fork the new way": "call('clone3', 0, 0)",
    "queue calls for the kernel": "call('io_uring_setup', 1, 0)",
    "start a program": "subprocess.run(['/bin/true'])",
    "become a program": "os.execv('/bin/true', ['true'])",
    "start a thread": "threading.Thread(target=int).start()",
    "change the user": "os.setuid(0)",
    "make a namespace": "libc.unshare(0x10000000) and os.strerror(ctypes.get_errno())",
    "pass descriptors": "fcntl.fcntl(1, fcntl.F_DUPFD, 0)",
    "have more memory": "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "have more files": "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
}


needs_filter = pytest.mark.skipif(bool(missing()) and not os.environ.get("CI"), reason=missing() or "nothing")


@needs_filter
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_escaped_can_do_nothing(attack: str, escaped: Escaped, place: dict[str, Any]) -> None:
    said = escaped.run(ATTACKS[attack].format(**place))
    refused = ("not permitted", "not implemented", "can't start new thread", "not allowed to raise")
    assert any(word in said for word in refused), said
    assert escaped.run("1 + 1") == "2"  # the worker goes on


@needs_filter
def test_the_kernel_says_the_same(escaped: Escaped) -> None:
    status = Path(f"/proc/{escaped.process.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    threads = list(Path(f"/proc/{escaped.process.pid}/task").iterdir())
    assert all("Seccomp:\t2" in (thread / "status").read_text() for thread in threads)


def test_a_machine_without_the_library_renders_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Escaped(library="libnone.so.7")
    assert "libnone.so.7 was not found" in worker.ready["lacks"]
    assert worker.render("{{ 1 + 1 }}")["text"] == "2"
    worker.close()
    monkeypatch.setattr(confinement, "LIBRARY", "libnone.so.7")
    confinement._library.cache_clear()
    (warning,) = check_confinement()
    confinement._library.cache_clear()
    assert "libnone.so.7" in warning.msg and "libseccomp2" in str(warning.hint)
    monkeypatch.undo()
    assert not list(check_confinement()) or missing()
