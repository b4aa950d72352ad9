"""Whether the database, Redis and a worker of each queue answer, and whether the disk has room."""

import shutil
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.cache import cache
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from rollouts.jobs.broker import redis_fault

MIN_FREE_BYTES = 100 << 20  # With less room on the disk of the data folder something will soon fail.
PATIENCE_SECONDS = 5  # How long work may wait before a page asks whether any worker is there.


def heartbeat_key(queue: str) -> str:
    """The cache key that a worker of `queue` keeps alive."""
    return f"heartbeat:{queue}"


def redis_problem() -> str:
    """Why Redis takes no write, as a sentence; empty = it takes one. Never raises. A Redis without memory still answers
    a read, and no heartbeat of a worker is written there any more."""
    try:
        cache.set("health", 1, 60)
    except Exception as error:
        return redis_fault(error)
    return ""


def has_worker(queue: str) -> bool | None:
    """Whether a worker of `queue` had a heartbeat lately; None when Redis takes none. Never raises."""
    try:
        lives = cache.get(heartbeat_key(queue)) is not None
    except Exception:  # the page that asks still has to be drawn
        return None
    return lives or (None if redis_problem() else False)


def served_queues() -> list[str]:
    """The queues that must have a worker."""
    return ["default", *settings.ENGINE_QUEUES]


def check_health() -> dict[str, Any]:
    """A sentence of each part, and of the worker of each queue; "ok" where it is well. Never raises."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        database = "ok"
    except Exception as error:
        database = f"The database does not answer ({type(error).__name__}). Look at DATABASE_URL."
    try:
        alive = cache.get_many([heartbeat_key(queue) for queue in served_queues()])
        redis = redis_problem() or "ok"
    except Exception as error:
        alive, redis = {}, redis_fault(error)
    workers = {
        queue: "ok"
        if alive.get(heartbeat_key(queue)) is not None
        else "No worker serves this queue; one that is starting needs some seconds."
        for queue in served_queues()
    }
    return {"database": database, "redis": redis, "disk": _disk(), "workers": workers}


def _disk() -> str:
    try:
        free = shutil.disk_usage(settings.INSPECTOR_DATA).free
    except OSError as error:
        return f"The data folder cannot be read ({type(error).__name__}). Look at INSPECTOR_DATA."
    if free >= MIN_FREE_BYTES:
        return "ok"
    return (
        f"The disk of the data folder has {free >> 20} MB left. Imports, uploads and exports will fail: make room, "
        f"{MIN_FREE_BYTES >> 20} MB at least."
    )


@login_not_required
@never_cache
@require_safe
def health(request: HttpRequest) -> JsonResponse:
    """Answers 200 when every part is well, 503 otherwise. Says nothing about the data."""
    state = check_health()
    is_well = {state["database"], state["redis"], state["disk"], *state["workers"].values()} == {"ok"}
    return JsonResponse({"status": "ok" if is_well else "degraded", **state}, status=200 if is_well else 503)
