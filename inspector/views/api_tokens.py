"""`/tokens`: make, list and revoke the tokens by which a trainer pushes trajectories."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.web.twins import json_page, page, wants_json
from rollouts.models import ApiToken
from rollouts.services.api_tokens import create_api_token, revoke_api_token

MAX_LISTED = 200


def _values(record: ApiToken) -> dict[str, Any]:
    return {
        "id": record.pk,
        "hint": record.hint,
        "name": record.name,
        "made_by": record.created_by.get_username(),
        "created_at": record.created_at,
        "last_used_at": record.last_used_at,
        "revoked_at": record.revoked_at,
        "state": "revoked" if record.revoked_at else "live",
    }


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of tokens, newest first; a POST makes one and shows it, once."""
    made, status = {}, 200
    if request.method == "POST":
        record, token = create_api_token(request.user, request.POST.get("name", "").replace("\0", ""))
        made, status = {"made": {**_values(record), "token": token}}, 201
    tokens = ApiToken.objects.select_related("created_by").order_by("-pk")[:MAX_LISTED]
    data = {"tokens": [_values(token) for token in tokens], **made}
    return page(request, "tokens/index.html", data, status, address=request.build_absolute_uri("/").rstrip("/"))


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    record = get_object_or_404(ApiToken.objects.select_related("created_by"), pk=pk)
    revoke_api_token(record)
    if wants_json(request):
        return json_page(_values(record))
    messages.success(request, f"The token {record.hint}… was revoked; whatever still uses it is told so.")
    return redirect("api-tokens")
