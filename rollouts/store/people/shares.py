"""Share links and API keys. Each function is one query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Case, Exists, OuterRef, Q, QuerySet, Value, When

from rollouts.store.models import ApiToken, Membership, Role, Run, ShareLink, StoredTrajectory, TemplateCheck
from rollouts.store.people.access import Access

Shared = Run | StoredTrajectory | TemplateCheck
"""The targets of share links."""


def _with_makers(found: QuerySet[ShareLink]) -> QuerySet[ShareLink]:
    """Links that know whether their maker could still make them."""
    roles = Membership.objects.filter(project=OuterRef("project"), user=OuterRef("created_by"))
    shares = Q(Exists(roles.exclude(role=Role.VIEWER))) | Q(created_by__is_superuser=True)
    return found.annotate(maker_left=Case(When(shares, created_by__is_active=True, then=False), default=Value(True)))


def maker_left(link: ShareLink) -> bool:
    """Whether its maker is no longer a member of the project, or the account is closed. For links of this module."""
    return bool(getattr(link, "maker_left", False))


def _links() -> QuerySet[ShareLink]:
    """Links with their targets, without long columns."""
    found = ShareLink.objects.select_related("run", "trajectory__run", "check_result", "created_by", "project")
    return _with_makers(found.defer("check_result__report"))


def newest_shares(access: Access, limit: int, target: Shared | None = None) -> list[ShareLink]:
    """The links of the projects that somebody may see, newest first, each with its target and its owner.

    ``target``: only the links to that object; those of a run include the links to its trajectories.
    """
    found = access.limit(_links())
    if isinstance(target, Run):
        found = found.filter(Q(run=target) | Q(trajectory__run=target))
    elif isinstance(target, StoredTrajectory):
        found = found.filter(Q(trajectory=target) | Q(run_id=target.run_id))
    elif target is not None:
        found = found.filter(check_result=target)
    return list(found.order_by("-pk")[:limit])


def find_share(**column: Any) -> ShareLink | None:
    """The link with that ``pk`` or that ``token_sha256``, with its target and its owner."""
    return _links().filter(**column).first()


def shares_of(target: Shared, keys: Iterable[int]) -> list[ShareLink]:
    """The links with these keys that open the target. A link to a run also opens its trajectories.

    A link to some tokens opens its own page alone, so that it is none of them.
    """
    match: Q
    if isinstance(target, Run):
        match = Q(run=target)
    elif isinstance(target, StoredTrajectory):
        match = Q(trajectory=target) | Q(run_id=target.run_id)
    else:
        match = Q(check_result=target)
    return list(_with_makers(ShareLink.objects.filter(match, pk__in=list(keys), row_index=None)))


def newest_api_keys(access: Access, user: Any, limit: int) -> list[ApiToken]:
    """The API keys of a user, and those of the projects in which the user is an admin, newest first."""
    found = ApiToken.objects.select_related("created_by", "project")
    administered = access.limit(ApiToken.objects.all(), least=Role.ADMIN)
    return list(found.filter(Q(created_by=user) | Q(pk__in=administered.values("pk"))).order_by("-pk")[:limit])


def api_key_by_pk(pk: int) -> ApiToken | None:
    """The API key with that key, with its owner and its project."""
    return ApiToken.objects.select_related("created_by", "project").filter(pk=pk).first()
