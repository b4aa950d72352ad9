"""Whether the process of this container lives: `python -m inspector.server.alive [web|worker|engine]`, status 0 or 1.
Without a role, the command line of process 1 says which one it is. A process lives although another one is missing: a
web server without workers, and a worker that waits for the database."""

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROLES = {"gunicorn": "web", "web": "web", "celery": "worker", "worker": "worker", "engine": "engine"}
"""A word of the command line -> the role."""


def role_of(command: str) -> str:
    """The role of a command line whose words end in NUL; empty where it is none of ours."""
    words = [Path(word).name for word in command.split("\0")]
    return next((ROLES[word] for word in words if word in ROLES), "")


def fault(role: str) -> str:
    """Why a role does not live; empty = it lives, or nothing is known of such a role."""
    if role == "web":
        return _fault_of_web(os.environ.get("BIND", "0.0.0.0:8000").rpartition(":")[2])
    return _fault_of_worker(role) if role in ("worker", "engine") else ""


def _fault_of_web(port: str) -> str:
    host = os.environ.get("ALLOWED_HOSTS", "").split(",")[0].strip().replace("*", "") or "localhost"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers={"Host": host.lstrip(".")})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            health = json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            health = json.load(error)
        except ValueError:
            return f"The web server answers {error.code} for the host {host}. Name it in ALLOWED_HOSTS."
    except (OSError, ValueError) as error:
        return f"The web server does not answer on port {port}: {error}"
    if "error" in health:
        return str(health["error"])
    lacks = [health.get(part, "It says nothing of itself.") for part in ("database", "redis")]
    return " ".join(sentence for sentence in lacks if sentence != "ok")


def is_of(role: str, name: str, host: str) -> bool:
    """Whether the worker of this name has the role, on this host: ``inspector/server/start`` names it so."""
    before, _, after = name.rpartition("@")
    return after == host and before.partition(".")[0] == role


def _fault_of_worker(role: str) -> str:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
    import redis

    from inspector.server.workers import connect, list_workers

    try:
        workers = list_workers(connect())
    except redis.RedisError as error:
        return f"Redis does not answer ({type(error).__name__}). Look at REDIS_URL."
    here = socket.gethostname()
    if any(worker.is_alive and is_of(role, worker.name, here) for worker in workers):
        return ""
    return f"No {role} of {here} has had a heartbeat lately."


if __name__ == "__main__":
    role = sys.argv[1] if len(sys.argv) > 1 else role_of(Path("/proc/1/cmdline").read_text())
    if sentence := fault(role):
        sys.exit(sentence)
