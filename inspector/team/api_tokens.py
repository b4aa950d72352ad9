"""`/tokens`: make, list and revoke the tokens by which a trainer pushes trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.web.audit import note
from inspector.web.twins import Page, error_page, from_columns, json_page, page, wants_json
from rollouts import services
from rollouts.models import ApiToken
from rollouts.selectors.shares import api_token_by_key, newest_api_tokens
from rollouts.services.api_tokens import create_api_token
from rollouts.services.audit import Action

MAX_LISTED = 200


@dataclass(frozen=True)
class ApiTokenLine(Page):
    """An API token as a line of the list; the token itself is not kept."""

    id: int
    """Names it in addresses."""
    hint: str
    """Its first characters."""
    name: str
    """What uses it."""
    made_by: str
    """Whose name it writes in."""
    created_at: datetime
    """When it was made."""
    last_used_at: datetime | None
    """To the minute."""
    revoked_at: datetime | None
    """When it was revoked."""
    state: str
    """`live` or `revoked`."""

    @classmethod
    def of(cls, record: ApiToken, /, **more: Any) -> Self:
        """The record, and what a subclass adds."""
        made_by, state = record.created_by.get_username(), "revoked" if record.revoked_at else "live"
        return from_columns(cls, record, made_by=made_by, state=state, **more)


@dataclass(frozen=True)
class NewApiToken(ApiTokenLine):
    """An API token that was made by this request."""

    token: str
    """Shown once."""


@dataclass(frozen=True)
class ApiTokensPage(Page):
    """The API tokens."""

    tokens: list[ApiTokenLine]
    """Newest first."""


@dataclass(frozen=True)
class ApiTokenMadePage(ApiTokensPage):
    """The API tokens after one was made."""

    made: NewApiToken
    """That one."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of tokens, newest first; a POST makes one and shows it, once."""
    address = request.build_absolute_uri("/").rstrip("/")
    if request.method != "POST":
        return page(request, "tokens/index.html", ApiTokensPage(_lines()), address=address)
    record, token = create_api_token(request.user, request.POST.get("name", "").replace("\0", ""))
    note(request, Action.TOKEN_MADE, record, detail=record.name)
    shown = ApiTokenMadePage(_lines(), NewApiToken.of(record, token=token))
    return page(request, "tokens/index.html", shown, 201, address=address)


def may_revoke(request: HttpRequest, maker_id: int) -> bool:
    """Whether the user of a request may revoke the API tokens of a user."""
    return bool(request.user.pk == maker_id or request.user.is_staff)


def _lines() -> list[ApiTokenLine]:
    return [ApiTokenLine.of(record) for record in newest_api_tokens(MAX_LISTED)]


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    record = api_token_by_key(pk)
    if record is None:
        raise Http404("There is no such API token.")
    if not may_revoke(request, record.created_by_id):
        sentence = "Only its maker or an administrator revokes an API token. Ask them, or use manage.py api_token."
        return error_page(request, 403, "This token is not yours", sentence)
    services.revoke(record)
    note(request, Action.TOKEN_REVOKED, record, detail=record.name)
    if wants_json(request):
        return json_page(ApiTokenLine.of(record))
    messages.success(request, f"The token {record.hint}… was revoked; a program that still uses it is told so.")
    return redirect("api-tokens")
