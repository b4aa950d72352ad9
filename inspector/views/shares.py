"""`/shares`: make, list and revoke links; `/s/<token>`: open one without a login."""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from inspector.web.access import is_live, may_write, remember_grant, share_is_over
from inspector.web.forms import ShareForm
from inspector.web.twins import json_page, page, wants_json
from rollouts import services
from rollouts.models import Run, ShareLink, StoredTrajectory, TemplateCheck

MAX_LISTED = 200
MODELS: dict[str, Any] = {"run": Run, "trajectory": StoredTrajectory, "check": TemplateCheck}


def _links() -> QuerySet[ShareLink]:
    """Links with what they open, without what of it is long."""
    found = ShareLink.objects.select_related("run", "trajectory", "check_result__chat_template", "created_by")
    return found.defer("check_result__report", "check_result__chat_template__text")


def target_of(link: ShareLink) -> tuple[str, str, str]:
    """Kind, name and address (query included) of what a link opens."""
    query = f"?{link.query}" if link.query else ""
    if link.run is not None:
        return "run", link.run.name, f"/runs/{link.run.code}{query}"
    if link.trajectory is not None:
        return "trajectory", link.trajectory.external_id, f"/trajectories/{link.trajectory.code}{query}"
    if link.check_result is not None:
        return "check", str(link.check_result.chat_template), f"/templates/checks/{link.check_result.code}{query}"
    raise Http404("What this link opened has been deleted.")


def _values(link: ShareLink) -> dict[str, Any]:
    kind, name, url = target_of(link)
    state = "live" if is_live(link) else "revoked" if link.revoked_at else "expired"
    return {
        "id": link.pk,
        "hint": link.hint,
        "kind": kind,
        "name": name,
        "url": url,
        "query": link.query,
        "note": link.note,
        "made_by": link.created_by.get_username(),
        "created_at": link.created_at,
        "expires_at": link.expires_at,
        "revoked_at": link.revoked_at,
        "state": state,
    }


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of links, newest first; a POST makes one and shows its address, once."""
    if request.method == "POST":
        return _create(request)
    links = _links().order_by("-pk")[:MAX_LISTED]
    return page(request, "shares/index.html", {"shares": [_values(link) for link in links]})


def _create(request: HttpRequest) -> HttpResponse:
    form = ShareForm(request.POST)
    if not form.is_valid():
        data = {"errors": form.sentences()}
        return page(request, "shares/refused.html", data, 422, form=form)
    wanted = form.cleaned_data
    target: Any = get_object_or_404(MODELS[wanted["target"]], code=wanted["code"])
    link, token = services.create_share(
        request.user, target, query=wanted["query"].lstrip("?"), note=wanted["note"], days=wanted["days"]
    )
    address = request.build_absolute_uri(f"/s/{token}")
    facts = {**_values(link), "link": address}
    template = "shares/_made.html" if request.headers.get("HX-Request") == "true" else "shares/made.html"
    return page(request, template, {"share": facts}, 201)


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    link = get_object_or_404(_links(), pk=pk)
    services.revoke_share(link)
    if wants_json(request):
        link.refresh_from_db()
        return json_page(_values(link))
    messages.success(request, f"The link {link.hint}… was revoked; whoever opens it now is told so.")
    return redirect("shares")


@login_not_required
@require_safe
@never_cache
def open_link(request: HttpRequest, token: str) -> HttpResponse:
    """Remember the grant in this browser and go to the target; 410 when the link is over, 404 when it never was."""
    wanted_json = token.endswith(".json")
    token = token.removesuffix(".json")
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    link = _links().filter(token_sha256=digest).first()
    if link is None:
        raise Http404("There is no such share link. It may be cut short: copy the whole address.")
    if not is_live(link):
        return share_is_over(request)
    _, _, url = target_of(link)
    if not may_write(request):
        remember_grant(request, link)
    if wanted_json:
        path, _, query = url.partition("?")
        url = f"{path}.json{'?' + query if query else ''}"
    response = HttpResponseRedirect(url)
    response["Referrer-Policy"] = "no-referrer"
    return response
