"""`/login`: by a one-time link, or by name and password; `/logout`."""

from django.conf import settings
from django.contrib.auth import login as start_session
from django.contrib.auth import logout as end_session
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import AuthenticationForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.template.loader import select_template
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from inspector.web.login import local_user, use_token

BACKEND = "django.contrib.auth.backends.ModelBackend"


def _next_page(request: HttpRequest) -> str:
    """Where the visitor was going, if that is on this server; the start page otherwise."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    allowed = url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure())
    return target if allowed else str(settings.LOGIN_REDIRECT_URL)


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def login(request: HttpRequest) -> HttpResponse:
    token = request.GET.get("token", "")
    if request.method == "GET" and token and use_token(token):
        start_session(request, local_user(), backend=BACKEND)  # type: ignore[arg-type]
        return HttpResponseRedirect(_next_page(request))
    if request.method == "GET" and request.user.is_authenticated:
        return HttpResponseRedirect(_next_page(request))
    form = AuthenticationForm(request, data=request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        start_session(request, form.get_user())
        return HttpResponseRedirect(_next_page(request))
    layout = select_template(["base.html", "bare.html"]).template  # type: ignore[attr-defined]
    context = {"form": form, "next": _next_page(request), "link_is_used": bool(token), "layout": layout}
    return render(request, "login.html", context, status=403 if token else 200)


@login_not_required
@require_POST
def logout(request: HttpRequest) -> HttpResponse:
    end_session(request)
    return redirect(settings.LOGIN_URL)
