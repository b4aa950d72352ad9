"""Who may see what: someone logged in sees everything; a share link shows one target and changes nothing.

A run's link covers its trajectories. Every view that a share link may open is wrapped by one of the `reads_...`
decorators, which finds the object, decides, and hands the object to the view; every other view needs a login (the
middleware's rule).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from django.contrib.auth.decorators import login_not_required
from django.db.models import Model, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_safe

from inspector.web.login import LoginRequiredMiddleware
from inspector.web.twins import error_page
from rollouts.models import Run, ShareLink, StoredTrajectory, TemplateCheck

SESSION_KEY = "shares"
MAX_GRANTS = 50

T = TypeVar("T", bound=Model)
View = Callable[..., HttpResponse]


def may_write(request: HttpRequest) -> bool:
    """True for someone logged in; the visitor of a share link only reads."""
    return bool(getattr(request, "user", None) and request.user.is_authenticated)


def remember_grant(request: HttpRequest, link: ShareLink) -> None:
    """Keep a link's grant in this browser's session; the oldest of too many are forgotten."""
    held = [pk for pk in request.session.get(SESSION_KEY, []) if pk != link.pk]
    request.session[SESSION_KEY] = [*held, link.pk][-MAX_GRANTS:]


def is_live(link: ShareLink) -> bool:
    """Neither revoked nor expired."""
    return link.revoked_at is None and link.expires_at > timezone.now()


def covers(link: ShareLink, target: Model) -> bool:
    """The link is for this target, or for the run it belongs to."""
    if isinstance(target, Run):
        return link.run_id == target.pk
    if isinstance(target, StoredTrajectory):
        return link.trajectory_id == target.pk or link.run_id == target.run_id
    return isinstance(target, TemplateCheck) and link.check_result_id == target.pk


def _grant(request: HttpRequest, target: Model) -> tuple[ShareLink | None, bool]:
    """The live link that opens this target, and whether one that is over was held. One query."""
    held = request.session.get(SESSION_KEY, [])
    if not held:
        return None, False
    match: Q
    if isinstance(target, Run):
        match = Q(run=target)
    elif isinstance(target, StoredTrajectory):
        match = Q(trajectory=target) | Q(run_id=target.run_id)
    else:
        match = Q(check_result=target)
    links = list(ShareLink.objects.filter(match, pk__in=held))
    live = next((link for link in links if is_live(link)), None)
    return live, bool(links)


def no_permission(request: HttpRequest, view: View) -> HttpResponse:
    """To the login page, or a status for scripts."""
    return LoginRequiredMiddleware(view).handle_no_permission(request, view)  # type: ignore[arg-type]


def share_is_over(request: HttpRequest) -> HttpResponse:
    """410: the link was good once."""
    return error_page(
        request,
        410,
        "This share link is over",
        "It has expired or was revoked by the person who made it. Ask them for a new one.",
    )


def _reads(find: Callable[[], QuerySet[T]], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            target = find().filter(code=code).first()
            request.share = None  # type: ignore[attr-defined]
            if not may_write(request):
                # Somebody without any grant learns nothing, not even whether the code exists.
                link, was_held = _grant(request, target) if target is not None else (None, False)
                if link is None:
                    return share_is_over(request) if was_held else no_permission(request, view)
                request.share = link  # type: ignore[attr-defined]
            if target is None:
                raise Http404(
                    f"There is no {noun} with the code {code}. It may have been deleted, or the link is cut short."
                )
            response = view(request, target, *args, **kwargs)
            patch_vary_headers(response, ["Cookie"])
            return response

        return login_not_required(require_safe(wrapped))

    return decorate


reads_run = _reads(lambda: Run.objects.all(), "run")
"""`view(request, run)`: for a login, or a link to the run. Tokenizer and templates are read where a page shows them:
most questions are a live page's, which are about the run alone."""

reads_trajectory = _reads(lambda: StoredTrajectory.objects.select_related("run"), "trajectory")
"""`view(request, trajectory)`: for a login, or a link to the trajectory or its run; the run comes loaded."""

reads_check = _reads(lambda: TemplateCheck.objects.select_related("tokenizer", "chat_template"), "template check")
"""`view(request, check)`: for a login, or a link to the check."""
