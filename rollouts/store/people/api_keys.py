"""API keys, by which programs work. The key is shown once; only its hash is kept."""

import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from rollouts.store import models
from rollouts.store.models import ApiToken, Role
from rollouts.store.people import activity_log
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action
from rollouts.store.people.shares import token_hash

PREFIX = "ri_"  # Prefix by which a token is recognised in a log or a repository.
LAST_USE_EVERY = timedelta(minutes=1)
MAX_CHARACTERS = 200


def create_api_key(
    user: Any,
    name: str = "",
    *,
    project: models.Project | None = None,
    scopes: Iterable[str] = (models.ApiToken.Scope.PUSH,),
    days: float | None = None,
) -> tuple[models.ApiToken, str]:
    """Make a token that works as this user in a project. Returns the record and the token itself. ``project``: the
    default one when it is None. ``days``: how long it works; None = until it is revoked."""
    token = PREFIX + secrets.token_urlsafe(32)
    record = models.ApiToken.objects.create(
        token_sha256=token_hash(token),
        hint=token[:8],
        name=name.strip()[:200] or "unnamed",
        created_by=user,
        project_id=project.pk if project is not None else models.default_project(),
        scopes=[models.ApiToken.Scope(scope).value for scope in scopes],
        expires_at=None if days is None else timezone.now() + timedelta(days=days),
    )
    activity_log.record(Action.TOKEN_MADE, record, detail=f"{record.name} ({', '.join(record.scopes)})")
    return record, token


def api_key_state(record: models.ApiToken) -> str:
    """``live``, ``revoked`` or ``expired``."""
    if record.revoked_at is not None:
        return "revoked"
    return "expired" if record.expires_at is not None and record.expires_at <= timezone.now() else "live"


def find_api_key(token: str) -> models.ApiToken | None:
    """The record of a valid token with its maker and project; None = it is refused, and ``api_key_fault`` says why."""
    if not token or len(token) > MAX_CHARACTERS:
        return None
    now = timezone.now()
    makers_role = models.Membership.objects.filter(project=OuterRef("project"), user=OuterRef("created_by"))
    live = models.ApiToken.objects.filter(
        Q(expires_at=None) | Q(expires_at__gt=now),
        Q(created_by__is_superuser=True) | Exists(makers_role),
        revoked_at=None,
        created_by__is_active=True,
    )
    record = live.select_related("created_by", "project").filter(token_sha256=token_hash(token)).first()
    # Once a minute at most: a trainer that pushes every second must not cost a write each time.
    if record is not None and (record.last_used_at is None or record.last_used_at < now - LAST_USE_EVERY):
        models.ApiToken.objects.filter(
            Q(last_used_at=None) | Q(last_used_at__lt=now - LAST_USE_EVERY), pk=record.pk
        ).update(last_used_at=now)
    return record


def api_key_fault(token: str) -> str:
    """Why a token is refused, in a sentence. Who holds the token may know that much."""
    record = models.ApiToken.objects.filter(token_sha256=token_hash(token[:MAX_CHARACTERS])).first()
    if record is None or record.revoked_at is not None:
        return "This API key is unknown or was revoked. Make a new one at /tokens."
    if api_key_state(record) == "expired":
        return f"This API key expired on {record.expires_at:%Y-%m-%d}. Make a new one at /tokens."
    return (
        "The person who made this API key may no longer work in its project. A member makes a new one at "
        "/tokens."
    )


def newest_api_keys(access: Access, user: Any, limit: int) -> list[ApiToken]:
    """The API keys of a user, and those of the projects in which the user is an admin, newest first."""
    keys = ApiToken.objects.select_related("created_by", "project")
    administered = access.limit(ApiToken.objects.all(), least=Role.ADMIN)
    return list(keys.filter(Q(created_by=user) | Q(pk__in=administered.values("pk"))).order_by("-pk")[:limit])


def api_key_by_pk(pk: int) -> ApiToken | None:
    """The API key with that key, with its owner and its project."""
    return ApiToken.objects.select_related("created_by", "project").filter(pk=pk).first()


def all_api_keys() -> list[models.ApiToken]:
    """Every API key, newest first, with its owner and its project. One query."""
    return list(models.ApiToken.objects.select_related("created_by", "project").order_by("-pk"))
