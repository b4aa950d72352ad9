"""What a user, or a program with an API key, may do in which project. Every list and every object is asked here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from django.db.models import Model, Q, QuerySet

from rollouts.store.models import ApiToken, Membership, Project, Role

RANK = {Role.VIEWER: 1, Role.MEMBER: 2, Role.ADMIN: 3}

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Access:
    """What one user may do. Without roles it is a visitor, who may do nothing."""

    is_server_admin: bool = False  # May do everything in every project, and manages accounts and projects.
    roles: Mapping[int, Role] = field(default_factory=dict)
    """Key of a project -> the role in it. A project of which nothing stands here does not exist for this user."""

    def role_in(self, project: int | None) -> Role | None:
        """The role in the project with this key; None = the project is hidden."""
        if self.is_server_admin:
            return Role.ADMIN
        return None if project is None else self.roles.get(project)

    def may(self, project: int | None, least: Role) -> bool:
        """Whether the role in a project is this one or a higher one."""
        role = self.role_in(project)
        return role is not None and RANK[role] >= RANK[least]

    def limit(
        self, found: QuerySet[M], column: str = "project", *others: str, least: Role = Role.VIEWER
    ) -> QuerySet[M]:
        """Only the rows of projects in which the role is at least ``least``. ``column``: the path to the project.
        ``others``: further paths, of rows that belong to a project in one of several ways."""
        if self.is_server_admin:
            return found
        keys = [key for key, role in self.roles.items() if RANK[role] >= RANK[least]]
        return found.filter(reduce(or_, (Q(**{f"{path}__in": keys}) for path in (column, *others))))

    def projects(self, least: Role = Role.VIEWER) -> list[Project]:
        """The projects in which the role is at least ``least``, by name. One query."""
        return list(self.limit(Project.objects.order_by("name"), "pk", least=least))


EVERYTHING = Access(is_server_admin=True)  # What the person at the command line may do.


def access_of(user: Any) -> Access:
    """What a user may do; ``user`` may be anonymous or None. One query, none for an admin of the server."""
    if user is None or not getattr(user, "is_authenticated", False) or not user.is_active:
        return Access()
    if user.is_superuser:
        return EVERYTHING
    roles = Membership.objects.filter(user=user).values_list("project", "role")
    return Access(roles={project: Role(role) for project, role in roles})


def access_of_api_key(token: ApiToken) -> Access:
    """What a token may do in its project: what its maker may do there today. Its scopes limit it further. One query.
    The token has its maker and its project loaded. The door that a request comes through asks whether the token has the
    scope for it."""
    role = access_of(token.created_by).role_in(token.project_id)
    if role is not None and set(token.scopes) <= {ApiToken.Scope.READ}:
        role = Role.VIEWER
    return Access(roles={} if role is None else {token.project.pk: role})


def admin_names(project: Project, limit: int = 3) -> list[str]:
    """The names of the first admins of a project whose accounts are active. One query."""
    admins = Membership.objects.filter(project=project, role=Role.ADMIN, user__is_active=True)
    return list(admins.order_by("created_at", "pk").values_list("user__username", flat=True)[:limit])
