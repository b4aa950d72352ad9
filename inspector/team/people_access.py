"""Who may open a page of people: the project of an address, and what only an admin of the server may do."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse

from inspector.web.access import access, found_or_404, too_low
from rollouts.store.models import Project, Role
from rollouts.store.people.members import find_project

View = Callable[..., HttpResponse]


def of_project(least: Role) -> Callable[[View], View]:
    """`view(request, project, ...)`: for whoever has at least this role in the project that the address names. A
    project that is hidden is answered like one that does not exist; a role that is too low with 403."""

    def decorate(view: View) -> View:
        @wraps(view)
        def wrapped(request: HttpRequest, code: str, *args: Any, **kwargs: Any) -> HttpResponse:
            target = find_project(code)
            role = access(request).role_in(target.pk) if target is not None else None
            project: Project = found_or_404(target if role is not None else None, "project", code)
            if not access(request).may(project.pk, least):
                raise too_low(project, role or Role.VIEWER, least)
            request.role = role  # type: ignore[attr-defined]  # what the page offers follows it
            return view(request, project, *args, **kwargs)

        return wrapped

    return decorate


def for_server_admins(view: View) -> View:
    """`view(request, ...)`: for an admin of the server."""

    @wraps(view)
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not access(request).is_server_admin:
            raise PermissionDenied("Only an admin of the server may do this. Ask one of them.")
        return view(request, *args, **kwargs)

    return wrapped
