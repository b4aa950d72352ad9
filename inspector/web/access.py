"""Who may see and change what: roles in projects (``rollouts.store.people.access``), and share links.

A `reads_...` or `writes_...` decorator finds the object of an address, decides, and hands the object to the view. An
object of a project in which the user has no role does not exist for that user: the answer is that of an unknown code.
A role that is too low is answered 403, with the role that is needed and whom to ask. A share link shows one target and
changes nothing; a run's link covers its trajectories. A page that makes something asks `chosen_project` where to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_POST, require_safe
from django_ratelimit.core import is_ratelimited

from inspector.web.login import LoginRequiredMiddleware
from inspector.web.twins import error_page
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.models import Project, Role, Run, ShareLink, StoredTrajectory, TemplateCheck
from rollouts.store.people.access import RANK, Access, access_of, admin_names
from rollouts.store.people.shares import Shared, maker_left, shares_of
from rollouts.store.runs.runs import find_run
from rollouts.store.trajectories.trajectories import find_trajectory

SESSION_KEY = "shares"
PROJECT_KEY = "project"
"""In the session: the code of the project in which this browser made something last."""
MAX_GRANTS = 50
MAX_GUESSES = "30/5m"
"""Wrong tokens of one kind from one address. A right one counts nothing."""

log = logging.getLogger(__name__)

T = TypeVar("T", Run, StoredTrajectory, TemplateCheck)
Found = TypeVar("Found")
View = Callable[..., HttpResponse]


def access(request: HttpRequest) -> Access:
    """What the user of a request may do. One query for a request, none for a visitor and an admin of the server.

    A door with other rules, such as that of API keys, sets ``request.access`` before anybody asks.
    """
    if not hasattr(request, "access"):
        request.access = access_of(getattr(request, "user", None))  # type: ignore[attr-defined]
    return request.access  # type: ignore[attr-defined, no-any-return]


def is_logged_in(request: HttpRequest) -> bool:
    """True for a user, False for the visitor of a share link."""
    return bool(getattr(request, "user", None) and request.user.is_authenticated)


def reader_of(request: HttpRequest) -> int | None:
    """The key of the user whose comments and marks a page may show; None for a visitor, with a share link or without.

    Who reads by a share link has no role in the project, and learns nothing of what its members say.
    """
    if not is_logged_in(request) or getattr(request, "share", None) is not None:
        return None
    return int(request.user.pk)  # type: ignore[arg-type]


def project_of(target: Shared) -> int | None:
    """The key of the project of an object."""
    return (target.run if isinstance(target, StoredTrajectory) else target).project_id


def role_of(request: HttpRequest) -> Role | None:
    """The role in the project of the object that the page is about; on other pages the highest role in any project."""
    if hasattr(request, "role"):
        return request.role  # type: ignore[no-any-return]
    held = access(request)
    return Role.ADMIN if held.is_server_admin else max(held.roles.values(), key=RANK.__getitem__, default=None)


def may_write(request: HttpRequest) -> bool:
    """Whether the user may change the object of the page, or make something where the page is about none."""
    role = role_of(request)
    return role is not None and RANK[role] >= RANK[Role.MEMBER]


def may_delete(request: HttpRequest, target: Run | TemplateCheck) -> bool:
    """Whether the user may delete an object: an admin of its project, or a member who made it."""
    held = access(request)
    made = is_logged_in(request) and target.created_by_id == request.user.pk
    return held.may(target.project_id, Role.MEMBER if made else Role.ADMIN)


def too_low(project: Project, role: Role, least: Role) -> PermissionDenied:
    """The refusal of a role that is too low; it names those who can raise it. One query."""
    names = " or ".join(admin_names(project)) or "an administrator of this server"
    return PermissionDenied(
        f"This takes the role {least} in the project “{project.name}”; yours is {role}. Ask {names} for it."
    )


def require(request: HttpRequest, target: Shared, least: Role) -> None:
    """Raises ``PermissionDenied`` with a sentence unless the role in the project of an object is at least ``least``."""
    held, key = access(request), project_of(target)
    if not held.may(key, least):
        project = (target.run if isinstance(target, StoredTrajectory) else target).project
        raise too_low(project, held.role_in(key) or Role.VIEWER, least)


def visible_projects(request: HttpRequest, least: Role = Role.VIEWER) -> list[Project]:
    """The projects in which the user has at least the role, by name. One query for a request."""
    held = access(request)
    if not hasattr(request, "projects"):
        request.projects = held.projects()  # type: ignore[attr-defined]
    return [project for project in request.projects if held.may(project.pk, least)]  # type: ignore[attr-defined]


def sees_several_projects(request: HttpRequest) -> bool:
    """Whether pages have to name projects. At most one query."""
    held = access(request)
    return len(visible_projects(request)) > 1 if held.is_server_admin else len(held.roles) > 1


def project_name(request: HttpRequest, key: int | None) -> str | None:
    """The name of a project for a page; None for a user who sees one project alone, and for a visitor.

    At most one query for a request.
    """
    if not sees_several_projects(request):
        return None
    return next((project.name for project in visible_projects(request) if project.pk == key), None)


def projects_to_filter(request: HttpRequest) -> list[Project]:
    """The projects that the filter of a list offers; none for a user who sees one project alone."""
    return visible_projects(request) if sees_several_projects(request) else []


@dataclass(frozen=True)
class ProjectChoice:
    """The project that a page works in, and those that it offers."""

    chosen: Project
    offered: list[Project]
    """By name; a page names projects only when there are several."""


def chosen_project(request: HttpRequest, least: Role = Role.MEMBER, preferred: Project | None = None) -> ProjectChoice:
    """The project that a request names by its code as ``project``, in the form or the address.

    Without one it is ``preferred``, or the project in which this browser made something last, or the first by name.
    Raises ``Http404`` for a project that is hidden or unknown, and ``PermissionDenied`` for a role below ``least``.
    One query; a second one to refuse.
    """
    offered = visible_projects(request, least)
    by_code = {project.code: project for project in offered}
    named = (request.POST.get("project") or request.GET.get("project") or "")[:64]
    if named and named not in by_code:
        hidden = next((one for one in visible_projects(request) if one.code == named), None)
        if hidden is None:
            raise Http404(f"There is no project with the code {named}. Leave it out, or choose one of the list.")
        raise too_low(hidden, access(request).role_in(hidden.pk) or Role.VIEWER, least)
    if not offered:
        raise PermissionDenied(
            f"You have the role {least} in no project. Ask an admin of a project, or an administrator of this server, "
            "for it."
        )
    wanted = named or (preferred.code if preferred else "") or str(request.session.get(PROJECT_KEY, ""))
    chosen = by_code.get(wanted, offered[0])
    if request.method == "POST" and len(offered) > 1 and request.session.get(PROJECT_KEY) != chosen.code:
        request.session[PROJECT_KEY] = chosen.code
    return ProjectChoice(chosen, offered)


def form_project(request: HttpRequest, preferred: Project | None = None) -> ProjectChoice | None:
    """`chosen_project` for the form below a list: None for a user who may only read what is listed.

    The project that filters the list is the form's too, where the user may make something in it.
    """
    offered = visible_projects(request, Role.MEMBER)
    named = request.GET.get("project", "")
    if not offered or (named and all(one.code != named for one in offered)):
        return None
    return chosen_project(request, preferred=preferred)


def remember_grant(request: HttpRequest, link: ShareLink) -> None:
    """Keep a link in the session of this browser. The session keeps the newest ``MAX_GRANTS`` links."""
    held = [pk for pk in request.session.get(SESSION_KEY, []) if pk != link.pk]
    request.session[SESSION_KEY] = [*held, link.pk][-MAX_GRANTS:]


def is_live(link: ShareLink) -> bool:
    """Neither revoked nor expired, and its maker may still share."""
    return link.revoked_at is None and link.expires_at > timezone.now() and not maker_left(link)


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
        "This link has expired or was revoked",
        "It ends too when the person who made it leaves the project. Ask for a new one.",
    )


def found_or_404(target: Found | None, noun: str, code: str) -> Found:
    """The target that a selector found. Raises ``Http404`` with a sentence for None."""
    if target is None:
        raise Http404(f"There is no {noun} with the code {code}. It may have been deleted, or the link is cut short.")
    return target


def visible(request: HttpRequest, target: T | None) -> T | None:
    """The target, or None when its project is hidden from the user. Keeps the role for the templates."""
    role = access(request).role_in(project_of(target)) if target is not None else None
    request.role = role  # type: ignore[attr-defined]
    return target if role is not None else None


def _reads(find: Callable[[str], T | None], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            found = find(code)
            request.share = None  # type: ignore[attr-defined]
            target = visible(request, found)
            if target is None and found is not None:
                link, was_held = _grant(request, found)
                if link is None and was_held:
                    return share_is_over(request)
                if link is not None:
                    target = found
                    request.share = link  # type: ignore[attr-defined]
                    if isinstance(target, Run):
                        target.makers_shown = False
            if target is None and not is_logged_in(request):
                # A visitor without a link learns nothing, not even whether the code exists.
                return no_permission(request, view)
            response = view(request, found_or_404(target, noun, code), *args, **kwargs)
            patch_vary_headers(response, ["Cookie"])
            if request.share is not None:  # type: ignore[attr-defined]
                # A page that a visitor leaves for another site does not tell that site where it was.
                response["Referrer-Policy"] = "no-referrer"
            return response

        return login_not_required(require_safe(wrapped))

    return decorate


def _writes(find: Callable[[str], T | None], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            target = found_or_404(visible(request, find(code)), noun, code)
            require(request, target, Role.MEMBER)
            return view(request, target, *args, **kwargs)

        return require_POST(wrapped)

    return decorate


reads_run = _reads(lambda code: find_run(code=code), "run")
"""`view(request, run)`: for a viewer, or a link to the run. Tokenizer and templates are not loaded: most requests
come from a live page, which does not show them."""

reads_trajectory = _reads(find_trajectory, "trajectory")
"""`view(request, trajectory)`: for a viewer, or a link to the trajectory or its run. The run is loaded."""

reads_check = _reads(find_check, "template check")
"""`view(request, check)`: for a viewer, or a link to the check. Tokenizer and template are loaded."""

writes_run = _writes(lambda code: find_run(code=code), "run")
"""`view(request, run)`: a POST of a member."""

writes_trajectory = _writes(find_trajectory, "trajectory")
"""`view(request, trajectory)`: a POST of a member. The run is loaded."""

writes_check = _writes(find_check, "template check")
"""`view(request, check)`: a POST of a member."""


def guessed_too_often(request: HttpRequest, kind: str, *, again: bool = False, rate: str = MAX_GUESSES) -> bool:
    """Whether the address of a request has tried too many wrong tokens of a kind; ``again`` counts one more.

    What cannot be counted, without Redis or an address, refuses nothing.
    """
    try:
        return bool(is_ratelimited(request, f"guess {kind}", key="ip", rate=rate, increment=again))
    except Exception as error:
        log.warning("wrong tokens are not counted kind=%s: %s", kind, error)
        return False
