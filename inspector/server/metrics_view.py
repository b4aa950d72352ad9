"""`/metrics`: the state of the system for Prometheus, and requests counted by view and status. Labels are names of
ours: no address, no user, no code. The processes of a web server count into mapped files of one folder (the
multiprocess mode of prometheus_client), so that whichever process is asked answers for all of them."""

import os
import time
from collections.abc import Callable
from contextlib import suppress

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from inspector.server.metrics_folder import FOLDER, allocate_counters
from inspector.server.paths import LOCAL_HOSTS
from inspector.server.state_metrics import StateCollector

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


FORWARDED = ("X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded", "X-Real-Ip")


@login_not_required
@never_cache
@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Counts and names of kinds, nothing of the data. 404 to whoever may not ask; 401 for a wrong token."""
    if settings.METRICS_TOKEN:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not constant_time_compare(token.strip(), settings.METRICS_TOKEN):
            answer = HttpResponse("Name the token of INSPECTOR_METRICS_TOKEN as a bearer token.\n", status=401)
            answer["WWW-Authenticate"], answer["Content-Type"] = "Bearer", "text/plain; charset=utf-8"
            return answer
    elif not _is_this_machine(request):
        raise Http404("Metrics need INSPECTOR_METRICS_TOKEN, or a request of this machine.")
    state = CollectorRegistry(auto_describe=False)
    state.register(StateCollector())
    return HttpResponse(generate_latest(request_registry()) + generate_latest(state), content_type=CONTENT_TYPE_LATEST)


def _is_this_machine(request: HttpRequest) -> bool:
    """Whether no other machine can have sent it: a proxy would make all requests look like those of this machine."""
    is_local_server = not settings.HTTPS and not set(settings.ALLOWED_HOSTS) - LOCAL_HOSTS
    passed_on = any(name in request.headers for name in FORWARDED)
    return is_local_server and not passed_on and request.META.get("REMOTE_ADDR") in ("127.0.0.1", "::1")
