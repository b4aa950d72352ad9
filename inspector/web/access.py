"""Who may see and change what: roles in projects (``rollouts.store.people.access``), and share links.

A `reads_...` or `writes_...` decorator finds the object of an address, decides, and hands the object to the view. An
object of a project in which the user has no role does not exist for that user: the answer is that of an unknown code.
A role that is too low is answered 403, with the role that is needed and whom to ask. A share link shows one target and
changes nothing; a run's link covers its trajectories. A page that makes something asks `chosen_project` where to.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.cache import patch_vary_headers
from django.views.decorators.http import require_POST, require_safe
from django_ratelimit.core import is_ratelimited

from inspector.web.login import LoginRequiredMiddleware
from inspector.web.twins import error_page
from rollouts.jobs.opened import fill
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.models import (
    AlarmRule, MutedKind, Project, Role, Run, ScoredColumn, ShareLink, StoredTrajectory, TemplateCheck
)
from rollouts.store.people.access import RANK, Access, access_of, admin_names
from rollouts.store.people.shares import Shared, maker_left, shares_of
from rollouts.store.runs.runs import find_run
from rollouts.store.trajectories.trajectories import find_trajectory

GRANTS_COOKIE = "inspector_shares"  # Signed: the keys of the share links that this browser has opened.
PROJECT_KEY = "project"  # In the session: the code of the project in which this browser made something last.
MAX_GRANTS = 50
MAX_GUESSES = "30/5m"  # Wrong tokens of one kind from one address. A right one counts nothing.

T = TypeVar("T", Run, StoredTrajectory, TemplateCheck)
R = TypeVar("R", AlarmRule, MutedKind)
Made = Run | TemplateCheck | ScoredColumn | AlarmRule | MutedKind | ShareLink  # What members make and delete.
Found = TypeVar("Found")
View = Callable[..., HttpResponse]


def access(request: HttpRequest) -> Access:
    """What the user of a request may do. One query for a request, none for a visitor and an admin of the server. A door
    with other rules, such as that of API keys, sets ``request.access`` before anybody asks."""
    if not hasattr(request, "access"):
        request.access = access_of(getattr(request, "user", None))  # type: ignore[attr-defined]
    return request.access  # type: ignore[attr-defined, no-any-return]


def is_logged_in(request: HttpRequest) -> bool:
    """True for a user, False for the visitor of a share link."""
    return bool(getattr(request, "user", None) and request.user.is_authenticated)


def reader_of(request: HttpRequest) -> int | None:
    """The key of the user whose comments and marks a page may show; None for a visitor, with a share link or without.
    Who reads by a share link has no role in the project, and learns nothing of what its members say."""
    if not is_logged_in(request) or getattr(request, "share", None) is not None:
        return None
    return int(request.user.pk)  # type: ignore[arg-type]


def project_of(target: Shared | Made) -> int | None:
    """The key of the project of an object."""
    return (target.run if isinstance(target, StoredTrajectory | ScoredColumn) else target).project_id


def role_of(request: HttpRequest) -> Role | None:
    """The role in the project of the object that the page is about; on other pages the highest role in any project."""
    if hasattr(request, "role"):
        return request.role  # type: ignore[no-any-return]
    reader = access(request)
    return Role.ADMIN if reader.is_server_admin else max(reader.roles.values(), key=RANK.__getitem__, default=None)


def may_write(request: HttpRequest) -> bool:
    """Whether the user may change the object of the page, or make something where the page is about none."""
    role = role_of(request)
    return role is not None and RANK[role] >= RANK[Role.MEMBER]


def may_delete(request: HttpRequest, target: Made) -> bool:
    """Whether the user may delete an object: an admin of its project, or a member who made it."""
    maker = target.author_id if isinstance(target, AlarmRule | MutedKind) else target.created_by_id
    is_maker = is_logged_in(request) and maker == request.user.pk
    return access(request).may(project_of(target), Role.MEMBER if is_maker else Role.ADMIN)


def may_remove(request: HttpRequest, maker: str | None) -> bool:
    """:func:`may_delete` for what the account of this name made in the project of the page's object."""
    return may_write(request) and (role_of(request) == Role.ADMIN or maker == request.user.get_username())


def require_maker(request: HttpRequest, target: Made) -> None:
    """Raises ``PermissionDenied`` with a sentence unless the user :func:`may_delete` an object."""
    require(request, target, Role.MEMBER)
    if not may_delete(request, target):
        raise PermissionDenied("Somebody else made this. They or an admin of the project can remove it.")


def too_low(project: Project, role: Role, least: Role) -> PermissionDenied:
    """The refusal of a role that is too low; it names those who can raise it. One query."""
    names = " or ".join(admin_names(project)) or "an administrator of this server"
    return PermissionDenied(
        f"This takes the role {least} in the project “{project.name}”; yours is {role}. Ask {names} for it."
    )


def require(request: HttpRequest, target: Shared | Made, least: Role) -> None:
    """Raises ``PermissionDenied`` with a sentence unless the role in the project of an object is at least ``least``."""
    reader, key = access(request), project_of(target)
    if not reader.may(key, least):
        project = (target.run if isinstance(target, StoredTrajectory | ScoredColumn) else target).project
        raise too_low(project, reader.role_in(key) or Role.VIEWER, least)


def require_rule(request: HttpRequest, rule: R | None, noun: str) -> R:
    """A rule that the user may take back. Raises ``Http404`` for a hidden one too, and as :func:`require`."""
    if rule is None or access(request).role_in(rule.project_id) is None:
        raise Http404(f"There is no such {noun}. Somebody may have taken it back already.")
    require_maker(request, rule)
    return rule


def run_of_form(request: HttpRequest, rule: MutedKind | AlarmRule) -> Run | None:
    """The run whose page sent the form about a rule; None where another page did."""
    run = find_run(code=request.POST.get("run", "")[:64].replace("\0", ""))
    return run if run is not None and run.project_id == rule.project_id else None


def visible_projects(request: HttpRequest, least: Role = Role.VIEWER) -> list[Project]:
    """The projects in which the user has at least the role, by name. One query for a request."""
    reader = access(request)
    if not hasattr(request, "projects"):
        request.projects = reader.projects()  # type: ignore[attr-defined]
    return [project for project in request.projects if reader.may(project.pk, least)]  # type: ignore[attr-defined]


def sees_several_projects(request: HttpRequest) -> bool:
    """Whether pages have to name projects. At most one query."""
    reader = access(request)
    return len(visible_projects(request)) > 1 if reader.is_server_admin else len(reader.roles) > 1


def project_name(request: HttpRequest, key: int | None) -> str | None:
    """The name of a project for a page; None for a user who sees one project alone, and for a visitor. At most one
    query for a request."""
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
    offered: list[Project]  # By name; a page names projects only when there are several.


def chosen_project(request: HttpRequest, least: Role = Role.MEMBER, preferred: Project | None = None) -> ProjectChoice:
    """The project that a request names by its code as ``project``, in the form or the address.

    Without one it is ``preferred``, or the project in which this browser made something last, or the first by name.
    Raises ``Http404`` for a project that is hidden or unknown, and ``PermissionDenied`` for a role below ``least``.
    One query; a second one to refuse.
    """
    offered = visible_projects(request, least)
    by_code = {project.code: project for project in offered}
    code = (request.POST.get("project") or request.GET.get("project") or "")[:64]
    if code and code not in by_code:
        hidden = next((candidate for candidate in visible_projects(request) if candidate.code == code), None)
        if hidden is None:
            raise Http404(f"There is no project with the code {code}. Leave it out, or choose one of the list.")
        raise too_low(hidden, access(request).role_in(hidden.pk) or Role.VIEWER, least)
    if not offered:
        raise PermissionDenied(
            f"You have the role {least} in no project. Ask an admin of a project, or an administrator of this server, "
            "for it."
        )
    chosen_code = code or (preferred.code if preferred else "") or str(request.session.get(PROJECT_KEY, ""))
    chosen = by_code.get(chosen_code, offered[0])
    if request.method == "POST" and len(offered) > 1 and request.session.get(PROJECT_KEY) != chosen.code:
        request.session[PROJECT_KEY] = chosen.code
    return ProjectChoice(chosen, offered)


def form_project(request: HttpRequest, preferred: Project | None = None) -> ProjectChoice | None:
    """`chosen_project` for the form below a list: None for a user who may only read what is listed. The project that
    filters the list is the form's too, where the user may make something in it."""
    offered = visible_projects(request, Role.MEMBER)
    code = request.GET.get("project", "")
    if not offered or (code and all(project.code != code for project in offered)):
        return None
    return chosen_project(request, preferred=preferred)


def remember_grant(request: HttpRequest, response: HttpResponse, link: ShareLink) -> None:
    """Keep a link in a signed cookie of this browser, of the newest ``MAX_GRANTS``. A visitor needs no session."""
    keys = [*(pk for pk in _grants(request) if pk != link.pk), link.pk][-MAX_GRANTS:]
    response.set_signed_cookie(
        GRANTS_COOKIE, ".".join(map(str, keys)), max_age=settings.SESSION_COOKIE_AGE, httponly=True, samesite="Lax",
        secure=settings.SESSION_COOKIE_SECURE,
    )


def _grants(request: HttpRequest) -> list[int]:
    """The keys of the links that this browser has opened."""
    value = request.get_signed_cookie(GRANTS_COOKIE, "", max_age=settings.SESSION_COOKIE_AGE)
    return [int(key) for key in (value or "").split(".") if key]


def is_live(link: ShareLink) -> bool:
    """Neither revoked nor expired, and its maker may still share."""
    return link.revoked_at is None and link.expires_at > timezone.now() and not maker_left(link)


def share_is_over(request: HttpRequest) -> HttpResponse:
    """Answers 410: the link worked once."""
    return error_page(
        request, 410, "This link has expired or was revoked",
        "It ends too when the person who made it leaves the project. Ask for a new one.",
    )


def found_or_404(target: Found | None, noun: str, code: str) -> Found:
    """The target that a selector found. Raises ``Http404`` with a sentence for None."""
    if target is None:
        raise Http404(f"There is no {noun} with the code {code}. It may have been deleted, or the link is cut short.")
    return target


def visible(request: HttpRequest, target: T | None) -> T | None:
    """The target, or None when its project is hidden from the user. Keeps target and role for the templates."""
    request.target = target  # type: ignore[attr-defined]
    role = access(request).role_in(project_of(target)) if target is not None else None
    request.role = role  # type: ignore[attr-defined]
    if role is not None and isinstance(target, StoredTrajectory):
        fill(target)
    return target if role is not None else None


def _reads(find: Callable[[str], T | None], noun: str) -> Callable[[View], View]:
    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            found = find(code)
            request.share = None  # type: ignore[attr-defined]
            target = visible(request, found)
            if target is None and found is not None:
                keys = _grants(request)
                links = shares_of(found, keys) if keys else []
                link = next(filter(is_live, links), None)
                if link is None and links:
                    return share_is_over(request)
                if link is not None:
                    target = found
                    request.share = link  # type: ignore[attr-defined]
                    if isinstance(target, Run):
                        target.makers_shown = False
            if target is None and not is_logged_in(request):
                # A visitor without a link learns nothing, not even whether the code exists.
                return LoginRequiredMiddleware(view).handle_no_permission(request, view)  # type: ignore[arg-type]
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

writes_run = _writes(lambda code: find_run(code=code), "run")  # `view(request, run)`: a POST of a member.

writes_trajectory = _writes(find_trajectory, "trajectory")
"""`view(request, trajectory)`: a POST of a member. The run is loaded."""

writes_check = _writes(find_check, "template check")  # `view(request, check)`: a POST of a member.


def guessed_too_often(request: HttpRequest, kind: str, *, again: bool = False, rate: str = MAX_GUESSES) -> bool:
    """Whether the address of a request has tried too many wrong tokens of a kind; ``again`` counts one more."""
    return bool(is_ratelimited(request, f"guess {kind}", key="ip", rate=rate, increment=again))
