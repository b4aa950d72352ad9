"""Share links and API tokens. Each function is one query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Q, QuerySet

from rollouts.models import ApiToken, Run, ShareLink, StoredTrajectory, TemplateCheck

Shared = Run | StoredTrajectory | TemplateCheck
"""The targets of share links."""


def _links() -> QuerySet[ShareLink]:
    """Links with their targets, without long columns."""
    found = ShareLink.objects.select_related("run", "trajectory", "check_result", "created_by")
    return found.defer("check_result__report")


def newest_shares(limit: int) -> list[ShareLink]:
    """The links that were made last, newest first, each with its target and its owner."""
    return list(_links().order_by("-pk")[:limit])


def find_share(**column: Any) -> ShareLink | None:
    """The link with that ``pk`` or that ``token_sha256``, with its target and its owner."""
    return _links().filter(**column).first()


def shares_of(target: Shared, keys: Iterable[int]) -> list[ShareLink]:
    """The links with these keys that open the target. A link to a run also opens its trajectories."""
    match: Q
    if isinstance(target, Run):
        match = Q(run=target)
    elif isinstance(target, StoredTrajectory):
        match = Q(trajectory=target) | Q(run_id=target.run_id)
    else:
        match = Q(check_result=target)
    return list(ShareLink.objects.filter(match, pk__in=list(keys)))


def newest_api_tokens(limit: int) -> list[ApiToken]:
    """The API tokens that were made last, newest first, each with its owner."""
    return list(ApiToken.objects.select_related("created_by").order_by("-pk")[:limit])


def api_token_by_key(pk: int) -> ApiToken | None:
    """The API token with that key, with its owner."""
    return ApiToken.objects.select_related("created_by").filter(pk=pk).first()
