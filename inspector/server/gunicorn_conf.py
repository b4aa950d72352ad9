"""How gunicorn serves the pages: few processes, many threads, loaded once and forked."""

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
from typing import Any

from django.conf import settings

from inspector.server.metrics_folder import FOLDER, claim_folder
from inspector.server.starting_page import StartingPage

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
_bind = os.environ.get("BIND", "")
_host, _, _port = _bind.rpartition(":")
_listener = None  # gunicorn opens what `--bind` or BIND names
if _bind.startswith("fd://"):
    _listener = socket.socket(fileno=int(_bind.removeprefix("fd://")))
elif _port.isdecimal():
    _family = socket.AF_INET6 if ":" in _host else socket.AF_INET
    _listener = socket.create_server((_host.strip("[]"), int(_port)), family=_family, backlog=2048)
if _listener is not None:
    _starting_page = StartingPage(_listener)
    _starting_page.open()
    bind = f"fd://{_listener.fileno()}"
elif _bind:
    bind = _bind
forwarder_headers = ""  # no header of a client or a proxy moves the addresses of the pages
worker_class = "inspector.server.web_worker.WebWorker"
worker_connections = 2000  # waiting for a client costs no thread; a client that does not go on is closed after 10 s
workers = min(2, multiprocessing.cpu_count())
threads = 16
preload_app = True
timeout = 120  # an upload of some gigabytes over a slow line
graceful_timeout = 3
keepalive = 15
sendfile = False  # the kernel would wait for slow readers unseen
# Requests are logged by inspector.server.logs, without query strings: a login token must not reach a file.
accesslog = None
errorlog = "-"
loglevel = "warning"
# Each connection is a descriptor, and many systems start with 1024 of them.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < 8192:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192 if _hard < 0 else min(8192, _hard), _hard))
# Before prometheus_client is imported: the counters of all processes lie in one folder.
_folder, _folder_lock = claim_folder(settings.INSPECTOR_DATA)
os.environ[FOLDER] = str(_folder)
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def on_starting(server: Any) -> None:
    """Refuse to serve a team on a public address without the settings that this needs."""
    from inspector.server.team_checks import UnsafeTeamServer, refuse_unsafe_team

    # A pair is an address of the network. A path and an inherited socket belong to who opened them.
    hosts = [address[0] for address in server.cfg.address if isinstance(address, tuple)]
    if _listener is not None and not _bind.startswith("fd://"):
        hosts.append(_host.strip("[]"))
    for host in hosts:
        try:
            refuse_unsafe_team(host)
        except UnsafeTeamServer as unsafe:
            sys.exit(str(unsafe))
    if _listener is not None:
        _starting_page.close()


def post_fork(server: Any, worker: Any) -> None:
    """A worker never outlives its master, even one that was killed."""
    from inspector.server.supervisor import die_with_parent

    die_with_parent(signal.SIGTERM)


def post_worker_init(worker: Any) -> None:
    """Tell the other machines what this web server is; `manage.py doctor` compares them."""
    from inspector.server.machines import TELL_SECONDS, describe, tell
    from inspector.server.workers import connect
    from rollouts.worker.heartbeat import repeat

    name = _name(worker.ppid)
    repeat("machine", TELL_SECONDS, lambda: tell(connect(), describe(name, "web")))


def on_exit(server: Any) -> None:
    """This web server has ended."""
    from redis import RedisError

    from inspector.server.machines import withdraw
    from inspector.server.workers import connect

    with contextlib.suppress(RedisError):
        withdraw(connect(), _name(server.pid))


def _name(pid: int) -> str:
    return f"web-{pid}@{socket.gethostname()}"
