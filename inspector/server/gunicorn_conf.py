"""How gunicorn serves the pages: few processes, many threads, loaded once and forked."""

import multiprocessing
import os
import signal
from typing import Any

worker_class = "gthread"
workers = min(2, multiprocessing.cpu_count())
threads = 16
preload_app = True
timeout = 120  # an upload of some gigabytes over a slow line
graceful_timeout = 3
keepalive = 15
# Requests are logged by inspector.server.logs, without query strings: a login token must not reach a file.
accesslog = None
errorlog = "-"
loglevel = "warning"
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def post_fork(server: Any, worker: Any) -> None:
    """A worker never outlives its master, even one that was killed."""
    from inspector.server.parent_death import die_with_parent

    die_with_parent(signal.SIGTERM)
