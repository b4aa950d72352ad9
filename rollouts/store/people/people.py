"""Projects with their members, invitations, accounts, login sessions and the audit log. Each function is one query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from rollouts.store.models import AuditEvent, Invitation, LoginSession, Membership, Project, Role
from rollouts.store.people.access import Access

MAX_LISTED = 500


def find_project(code: str) -> Project | None:
    """The project with that code."""
    return Project.objects.filter(code=code).first()


def find_project_named(text: str) -> Project | None:
    """The project with that code, else the project with that name."""
    found = Project.objects.filter(Q(code=text) | Q(name=text))
    return max(found, key=lambda project: project.code == text, default=None)


def listed_projects(access: Access) -> list[Project]:
    """The projects that somebody may see, by name, each with ``n_members``."""
    counted = Project.objects.annotate(n_members=Count("memberships"))
    return list(access.limit(counted.order_by("name"), "pk")[:MAX_LISTED])


def members_of(project: Project) -> list[Membership]:
    """The members of a project by name, each with its account."""
    found = Membership.objects.filter(project=project).select_related("user")
    return list(found.order_by("user__username")[:MAX_LISTED])


def memberships_of(user: Any) -> list[Membership]:
    """The projects that a user is in, by name."""
    return list(Membership.objects.filter(user=user).select_related("project").order_by("project__name"))


def newest_invitations(project: Project) -> list[Invitation]:
    """The invitations to a project, newest first."""
    return list(_invitations().filter(project=project).order_by("-pk")[:MAX_LISTED])


def find_invitation(**column: Any) -> Invitation | None:
    """The invitation with that ``pk`` or that ``token_sha256``, with its project and its maker."""
    return _invitations().filter(**column).first()


def _invitations() -> QuerySet[Invitation]:
    """Invitations with their project, maker and user, and with ``maker_is_admin``."""
    admins = Membership.objects.filter(project=OuterRef("project"), user=OuterRef("created_by"), role=Role.ADMIN)
    found = Invitation.objects.select_related("project", "created_by", "used_by")
    return found.annotate(maker_is_admin=Q(created_by__is_superuser=True) | Exists(admins))


def find_account(pk: int) -> Any | None:
    """The account with that key."""
    return get_user_model().objects.filter(pk=pk).first()


def server_admins() -> set[str]:
    """The names of the admins of the server. One query."""
    return set(get_user_model().objects.filter(is_superuser=True).values_list("username", flat=True))


def all_accounts(text: str = "") -> list[Any]:
    """The accounts by name, each with ``n_projects``. ``text``: a part of the name."""
    found = get_user_model().objects.annotate(n_projects=Count("memberships")).order_by("username")
    return list(found.filter(username__icontains=text)[:MAX_LISTED] if text else found[:MAX_LISTED])


def live_sessions(user: Any) -> list[LoginSession]:
    """The sessions that a user is logged in with, the one used last first."""
    found = LoginSession.objects.filter(user=user, session__expire_date__gt=timezone.now())
    return list(found.order_by("-last_used_at", "-pk")[:MAX_LISTED])


@dataclass(frozen=True)
class ActivityFilter:
    """Which events are wanted; an empty field means all."""

    action: str = ""
    user: str = ""
    """The whole name of an account."""
    project: int | None = None


def activity_events(access: Access, wanted: ActivityFilter) -> QuerySet[AuditEvent]:
    """The events of the projects in which somebody is an admin, newest first. An admin of the server sees all."""
    found = access.limit(AuditEvent.objects.select_related("project"), least=Role.ADMIN)
    if wanted.action:
        found = found.filter(action=wanted.action)
    if wanted.user:
        found = found.filter(user_name=wanted.user)
    if wanted.project is not None:
        found = found.filter(project=wanted.project)
    return found.order_by("-at", "-id")


def activity_page(access: Access, wanted: ActivityFilter, before: int | None, limit: int) -> list[AuditEvent]:
    """At most ``limit`` events, those older than the event with the key ``before``. One more query finds that one."""
    found = activity_events(access, wanted)
    if before is not None:
        # A hidden event is an unknown one: else the page would tell when it happened.
        at = activity_events(access, ActivityFilter()).filter(pk=before).values_list("at", flat=True).first()
        found = found.filter(pk__lt=before) if at is None else found.filter(Q(at__lt=at) | Q(at=at, pk__lt=before))
    return list(found[:limit])


def activity_rows(access: Access, wanted: ActivityFilter) -> Iterator[AuditEvent]:
    """All wanted events, newest first, a part at a time."""
    return activity_events(access, wanted).iterator(chunk_size=2000)
