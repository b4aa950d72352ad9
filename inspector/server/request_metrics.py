"""Counts requests for Prometheus, by view and status. Labels are names of ours: no address, no user, no code. The
processes of a web server count into mapped files of one folder (the multiprocess mode of prometheus_client), so that
whichever process is asked answers for all of them."""

import os
import time
from collections.abc import Callable
from contextlib import suppress

from django.http import HttpRequest, HttpResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from inspector.server.metrics_folder import FOLDER, allocate_counters

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram, in seconds."""

allocate_counters()
_registry = CollectorRegistry()
_requests = Counter("inspector_requests", "Requests answered.", ["view", "method", "status"], registry=_registry)
_seconds = Histogram(
    "inspector_request_seconds", "Time until the answer begins.", ["view"], buckets=BUCKETS, registry=_registry
)


class RequestMetricsMiddleware:
    """Counts each request under the name of its view; what no view answered counts under ``none``."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        started = time.perf_counter()
        response = self.get_response(request)
        view = (request.resolver_match.view_name if request.resolver_match else "") or "none"
        method = request.method if request.method in METHODS else "other"
        with suppress(OSError):  # no room for another counter: the request is answered all the same
            _requests.labels(view, method, str(response.status_code)).inc()
            _seconds.labels(view).observe(time.perf_counter() - started)
        return response


def request_registry() -> CollectorRegistry:
    """What all processes of this web server have counted; what this process has counted where it is the only one."""
    if FOLDER not in os.environ:
        return _registry
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
