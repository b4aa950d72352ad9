"""`/accounts`: an admin of the server closes and opens accounts, and says who else is one."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, Self

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from inspector.web.access import access, found_or_404, too_low
from inspector.web.twins import Page, error_page, page, told
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Membership, Project, Role
from rollouts.store.people import activity_log
from rollouts.store.people.accounts import all_accounts, end_sessions, find_account
from rollouts.store.people.activity_log import Action
from rollouts.store.people.members import find_project, set_account

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


CHANGES: dict[str, tuple[dict[str, bool], str]] = {
    "close": ({"is_active": False}, "closed"),
    "open": ({"is_active": True}, "opened"),
    "admin": ({"is_superuser": True}, "admin of the server"),
    "no-admin": ({"is_superuser": False}, "no admin of the server"),
}
"""What the form asks for -> the columns that change, and the words for it."""


@dataclass(frozen=True)
class AccountLine(Page):
    """An account as a line of the accounts of the server, or of the members of a project."""

    id: int
    """Names it in addresses."""
    name: str
    """The name to log in with."""
    is_active: bool
    """False: it can neither log in nor use its sessions and API keys."""
    created_at: datetime
    """When it was made; of a member: when it joined."""
    role: str | None = None
    """Of a member: in the project."""
    is_server_admin: bool | None = None
    """Of the server: it may do everything in every project, and manages accounts."""
    projects: int | None = None
    """Of the server: how many projects it has a role in."""
    last_login: datetime | None = None
    """Of the server: when it logged in last."""

    @classmethod
    def of(cls, user: Any) -> Self:
        """The account with ``n_projects``."""
        return cls(
            user.pk, user.get_username(), user.is_active, user.date_joined, is_server_admin=user.is_superuser,
            projects=user.n_projects, last_login=user.last_login,
        )

    @classmethod
    def of_member(cls, membership: Membership) -> Self:
        """The membership with its account."""
        user = membership.user
        return cls(user.pk, user.get_username(), user.is_active, membership.created_at, membership.role)


@require_safe
@never_cache
@for_server_admins
def index(request: HttpRequest) -> HttpResponse:
    """The accounts; `?text=` filters by name."""
    text = request.GET.get("text", "")[:150]
    accounts = [AccountLine.of(user) for user in all_accounts(text)]
    return page(request, "team/accounts.html", {"accounts": accounts, "text": text})


@require_POST
@for_server_admins
def change(request: HttpRequest, pk: int) -> HttpResponse:
    """Close or open an account, or say whether it is an admin of the server."""
    user = find_account(pk)
    if user is None:
        raise Http404("There is no such account.")
    change = CHANGES.get(request.POST.get("change", ""))
    if change is None:
        return error_page(request, 422, "Nothing was changed", f"Choose one of: {', '.join(CHANGES)}.")
    columns, words = change
    try:
        set_account(user, **columns)
    except Refusal as refusal:
        return error_page(request, 409, "Nothing was changed", str(refusal))
    if columns.get("is_active") is False:
        end_sessions(user)
    activity_log.record(Action.ACCOUNT_CHANGED, detail=f"{user.get_username()}: {words}")
    return told(request, f"The account {user.get_username()} is now: {words}.", "accounts")
