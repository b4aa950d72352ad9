"""`/login`: by a one-time link, by name and password, or through the provider of the organisation; `/logout`."""

from typing import Any

from django.conf import settings
from django.contrib.auth import login as start_session, logout as end_session
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm, UsernameField
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.template.loader import select_template
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST
from django_ratelimit.core import is_ratelimited

from inspector.web.login import use_token
from inspector.web.middleware import client_address
from rollouts.store.people import activity_log
from rollouts.store.people.accounts import active_user
from rollouts.store.people.activity_log import Action

BACKEND = "django.contrib.auth.backends.ModelBackend"


MAX_TRIES = {"account from address": "10/5m", "account": "100/5m", "address": "60/5m"}
"""How many passwords are checked for an account from one address, from all addresses, and for all of one address. One
address alone cannot lock the account of somebody elsewhere."""


def next_page(request: HttpRequest) -> str:
    """Where the visitor was going, if that is on this server; the start page otherwise."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    allowed = url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure())
    return target if allowed else str(settings.LOGIN_REDIRECT_URL)


def _typed_name(request: HttpRequest) -> str:
    """The name as the form looks it up, so that each spelling of a name counts for the same account."""
    return str(UsernameField(max_length=254).to_python(request.POST.get("username", "")))


def tried_too_often(request: HttpRequest, account: str) -> bool:
    """Counts this try of a password."""
    keys: dict[str, Any] = {
        "account": lambda *_: account,
        "account from address": lambda *_: f"{account} {client_address(request)}",
        "address": "ip",
    }
    over = False
    for of, rate in MAX_TRIES.items():  # each is counted, whatever the others say
        over |= is_ratelimited(request, "login", key=keys[of], rate=rate, increment=True)
    return over


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def login(request: HttpRequest) -> HttpResponse:
    token = request.GET.get("token", "")
    if request.method == "GET" and token:
        name = use_token(token)
        user = active_user(name) if name else None
        if user is not None:
            start_session(request, user, backend=BACKEND)
            activity_log.record(Action.LOGIN, detail="by link")
            return HttpResponseRedirect(next_page(request))
        activity_log.record(Action.LOGIN_FAILED, detail="a link that was used or is too old")
    if request.method == "GET" and request.user.is_authenticated:
        return HttpResponseRedirect(next_page(request))
    refused = request.method == "POST" and tried_too_often(request, _typed_name(request))
    form = AuthenticationForm(request, data=request.POST if request.method == "POST" and not refused else None)
    if request.method == "POST" and form.is_valid():
        start_session(request, form.get_user())
        activity_log.record(Action.LOGIN, detail="by password")
        return HttpResponseRedirect(next_page(request))
    if request.method == "POST" and not refused:
        activity_log.record(Action.LOGIN_FAILED, user=_typed_name(request)[:150], detail="by password")
    layout = select_template(["base.html", "bare.html"]).template  # type: ignore[attr-defined]
    context = {
        "form": form, "next": next_page(request), "link_is_used": bool(token), "layout": layout, "refused": refused,
        "provider": settings.OIDC_ISSUER and settings.OIDC_NAME, "team_mode": settings.TEAM_MODE,
    }
    return render(request, "login.html", context, status=429 if refused else 403 if token else 200)


@login_not_required
@require_POST
def logout(request: HttpRequest) -> HttpResponse:
    if request.user.is_authenticated:
        activity_log.record(Action.LOGOUT)
    end_session(request)
    response = redirect(settings.LOGIN_URL)
    response["Clear-Site-Data"] = '"cache"'  # pages that this browser kept
    return response
