"""`/health`: whether the database, Redis and the workers answer."""

from dataclasses import asdict

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.server.health import check_health


@login_not_required
@never_cache
@require_safe
def health(request: HttpRequest) -> JsonResponse:
    """Answers 200 when every part is well, 503 otherwise. Says nothing about the data."""
    state = check_health()
    body = {"status": "ok" if state.is_well else "degraded", **asdict(state)}
    return JsonResponse(body, status=200 if state.is_well else 503)
