"""Who may see what: a user who is logged in sees everything; a share link shows one target and changes nothing.

A run's link covers its trajectories. Every view that a share link may open is wrapped by one of the `reads_...`
decorators. The decorator finds the object, decides, and hands the object to the view. Every other view needs a login
(the middleware's rule); the `writes_...` decorators find the object for a POST.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_POST, require_safe

from inspector.web.login import LoginRequiredMiddleware
from inspector.web.twins import error_page
from rollouts.models import Run, ShareLink, StoredTrajectory, TemplateCheck
from rollouts.selectors.checks import find_check
from rollouts.selectors.runs import find_run, find_trajectory
from rollouts.selectors.shares import Shared, shares_of

SESSION_KEY = "shares"
MAX_GRANTS = 50

T = TypeVar("T", Run, StoredTrajectory, TemplateCheck)
Found = TypeVar("Found")
View = Callable[..., HttpResponse]


def may_write(request: HttpRequest) -> bool:
    """True for a user who is logged in. The visitor of a share link only reads."""
    return bool(getattr(request, "user", None) and request.user.is_authenticated)


def remember_grant(request: HttpRequest, link: ShareLink) -> None:
    """Keep a link in the session of this browser. The session keeps the newest ``MAX_GRANTS`` links."""
    held = [pk for pk in request.session.get(SESSION_KEY, []) if pk != link.pk]
    request.session[SESSION_KEY] = [*held, link.pk][-MAX_GRANTS:]


def is_live(link: ShareLink) -> bool:
    """Neither revoked nor expired."""
    return link.revoked_at is None and link.expires_at > timezone.now()


def _grant(request: HttpRequest, target: Shared) -> tuple[ShareLink | None, bool]:
    """The live link of this browser that opens the target, and whether the browser has any link to it. One query."""
    held = request.session.get(SESSION_KEY, [])
    links = shares_of(target, held) if held else []
    return next((link for link in links if is_live(link)), None), bool(links)


def no_permission(request: HttpRequest, view: View) -> HttpResponse:
    """Redirects to the login page; a script gets a status."""
    return LoginRequiredMiddleware(view).handle_no_permission(request, view)  # type: ignore[arg-type]


def share_is_over(request: HttpRequest) -> HttpResponse:
    """Answers 410: the link worked once."""
    return error_page(
        request,
        410,
        "This share link is over",
        "It has expired or was revoked by the person who made it. Ask them for a new one.",
    )


def found_or_404(target: Found | None, noun: str, code: str) -> Found:
    """The target that a selector found. Raises ``Http404`` with a sentence for None."""
    if target is None:
        raise Http404(f"There is no {noun} with the code {code}. It may have been deleted, or the link is cut short.")
    return target


def _reads(find: Callable[[str], T | None], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            target = find(code)
            request.share = None  # type: ignore[attr-defined]
            if not may_write(request):
                # A visitor without a link learns nothing, not even whether the code exists.
                link, was_held = _grant(request, target) if target is not None else (None, False)
                if link is None:
                    return share_is_over(request) if was_held else no_permission(request, view)
                request.share = link  # type: ignore[attr-defined]
            response = view(request, found_or_404(target, noun, code), *args, **kwargs)
            patch_vary_headers(response, ["Cookie"])
            return response

        return login_not_required(require_safe(wrapped))

    return decorate


def _writes(find: Callable[[str], T | None], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            return view(request, found_or_404(find(code), noun, code), *args, **kwargs)

        return require_POST(wrapped)

    return decorate


reads_run = _reads(lambda code: find_run(code=code), "run")
"""`view(request, run)`: for a login, or a link to the run. Tokenizer and templates are not loaded: most requests
come from a live page, which does not show them."""

reads_trajectory = _reads(find_trajectory, "trajectory")
"""`view(request, trajectory)`: for a login, or a link to the trajectory or its run. The run is loaded."""

reads_check = _reads(find_check, "template check")
"""`view(request, check)`: for a login, or a link to the check. Tokenizer and template are loaded."""

writes_run = _writes(lambda code: find_run(code=code), "run")
"""`view(request, run)`: a POST of a user who is logged in."""

writes_check = _writes(find_check, "template check")
"""`view(request, check)`: a POST of a user who is logged in."""
