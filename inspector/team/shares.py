"""`/shares`: make, list and revoke links; `/s/<token>`: open one without a login."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from inspector.web.access import access, found_or_404, is_live, remember_grant, require, share_is_over, visible
from inspector.web.audit import note
from inspector.web.forms import ShareForm
from inspector.web.twins import Page, from_columns, json_page, page, wants_json
from rollouts import services
from rollouts.models import Role, ShareLink
from rollouts.selectors.checks import find_check
from rollouts.selectors.runs import find_run, find_trajectory
from rollouts.selectors.shares import find_share, newest_shares
from rollouts.services.audit import Action

MAX_LISTED = 200
FIND: dict[str, Callable[[str], Any]] = {
    "run": lambda code: find_run(code=code), "trajectory": find_trajectory, "check": find_check,
}  # fmt: skip
"""Kind of a target -> how it is found by its code."""


def target_of(link: ShareLink) -> tuple[str, str, str]:
    """Kind, name and address (query included) of what a link opens."""
    query = f"?{link.query}" if link.query else ""
    if link.run is not None:
        return "run", link.run.name, f"/runs/{link.run.code}{query}"
    if link.trajectory is not None:
        return "trajectory", link.trajectory.external_id, f"/trajectories/{link.trajectory.code}{query}"
    if link.check_result is not None:
        return "check", link.check_result.template_name, f"/templates/checks/{link.check_result.code}{query}"
    raise Http404("What this link opened has been deleted.")


@dataclass(frozen=True)
class ShareLine(Page):
    """A share link as a line of the list; the token itself is not kept."""

    id: int
    """Names it in addresses."""
    hint: str
    """First characters of its token."""
    kind: str
    """Of its target: `run`, `trajectory` or `check`."""
    name: str
    """Of its target."""
    url: str
    """Of its target, query included."""
    query: str
    """The view that it opens."""
    note: str
    """Shown to everybody who opens it."""
    made_by: str
    """Who made it."""
    created_at: datetime
    """When it was made."""
    expires_at: datetime
    """Until when it works."""
    revoked_at: datetime | None
    """When it was revoked."""
    state: str
    """`live`, `revoked` or `expired`."""

    @classmethod
    def of(cls, record: ShareLink, /, **more: Any) -> Self:
        """The link with its target, and what a subclass adds. Raises ``Http404`` when the target was deleted."""
        kind, name, url = target_of(record)
        state = "live" if is_live(record) else "revoked" if record.revoked_at else "expired"
        made_by = record.created_by.get_username()
        return from_columns(cls, record, kind=kind, name=name, url=url, made_by=made_by, state=state, **more)


@dataclass(frozen=True)
class NewShare(ShareLine):
    """A share link that was made by this request."""

    link: str
    """The whole address, shown once."""


@dataclass(frozen=True)
class SharesPage(Page):
    """The share links."""

    shares: list[ShareLine]
    """Newest first."""


@dataclass(frozen=True)
class ShareMadePage(Page):
    """The answer to a form that made a link."""

    share: NewShare
    """The link."""


@dataclass(frozen=True)
class RefusedSharePage(Page):
    """The answer to a form that cannot make a link."""

    errors: dict[str, list[str]]
    """Field -> what is wrong with it."""


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of links, newest first; a POST makes one and shows its address, once."""
    if request.method == "POST":
        return _create(request)
    return page(request, "shares/index.html", SharesPage([ShareLine.of(link) for link in newest_shares(MAX_LISTED)]))


def _create(request: HttpRequest) -> HttpResponse:
    form = ShareForm(request.POST)
    if not form.is_valid():
        return page(request, "shares/refused.html", RefusedSharePage(form.sentences()), 422, form=form)
    wanted = form.cleaned_data
    target = found_or_404(visible(request, FIND[wanted["target"]](wanted["code"])), wanted["target"], wanted["code"])
    require(request, target, Role.MEMBER)
    link, token = services.create_share(
        request.user, target, query=wanted["query"].lstrip("?"), note=wanted["note"], days=wanted["days"]
    )
    address = request.build_absolute_uri(f"/s/{token}")
    template = "shares/_made.html" if request.headers.get("HX-Request") == "true" else "shares/made.html"
    return page(request, template, ShareMadePage(NewShare.of(link, link=address)), 201)


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    link = find_share(pk=pk)
    if link is None:
        raise Http404("There is no such share link.")
    services.revoke(link)
    note(request, Action.SHARE_REVOKED, link)
    if wants_json(request):
        return json_page(ShareLine.of(link))
    messages.success(request, f"The link {link.hint}… was revoked; the link now says so.")
    return redirect("shares")


@login_not_required
@require_safe
@never_cache
def open_link(request: HttpRequest, token: str) -> HttpResponse:
    """Remember the link in this browser and go to its target. 410 when the link is over, 404 when there is none."""
    wanted_json = token.endswith(".json")
    token = token.removesuffix(".json")
    link = find_share(token_sha256=services.token_hash(token))
    if link is None:
        raise Http404("There is no such share link. It may be cut short: copy the whole address.")
    if not is_live(link):
        return share_is_over(request)
    _, _, url = target_of(link)
    if not access(request).may(link.project_id, Role.VIEWER):
        remember_grant(request, link)
    if wanted_json:
        path, _, query = url.partition("?")
        url = f"{path}.json{'?' + query if query else ''}"
    response = HttpResponseRedirect(url)
    response["Referrer-Policy"] = "no-referrer"
    return response
