"""`/tokens`: make, list and revoke the tokens by which a trainer pushes trajectories."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.web.twins import json_page, page, wants_json
from rollouts.models import ApiToken
from rollouts.selectors.shares import api_token_by_key, newest_api_tokens
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
    data = {"tokens": [_values(one) for one in newest_api_tokens(MAX_LISTED)], **made}
    return page(request, "tokens/index.html", data, status, address=request.build_absolute_uri("/").rstrip("/"))


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    record = api_token_by_key(pk)
    if record is None:
        raise Http404("There is no such API token.")
    revoke_api_token(record)
    if wants_json(request):
        return json_page(_values(record))
    messages.success(request, f"The token {record.hint}… was revoked; whatever still uses it is told so.")
    return redirect("api-tokens")
