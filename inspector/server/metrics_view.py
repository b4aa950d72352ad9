"""`/metrics`: the state of the system for Prometheus."""

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from inspector.server.paths import LOCAL_HOSTS
from inspector.server.request_metrics import request_registry
from inspector.server.state_metrics import StateCollector

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
