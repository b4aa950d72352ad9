"""Share links, and API keys by which programs work. A token is shown once; only its hash is kept."""

import hashlib
import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db.models import Case, Exists, F, OuterRef, Q, QuerySet, Value, When
from django.utils import timezone

from rollouts.store import models
from rollouts.store.models import ApiToken, Membership, Role, Run, ShareLink, StoredTrajectory, TemplateCheck
from rollouts.store.people import activity_log
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action

Shared = Run | StoredTrajectory | TemplateCheck  # The targets of share links.


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
    links = ShareLink.objects.select_related("run", "trajectory__run", "check_result", "created_by", "project")
    return _with_makers(links.defer("check_result__report"))


def newest_shares(access: Access, limit: int, target: Shared | None = None) -> list[ShareLink]:
    """The links of the projects that somebody may see, newest first, each with its target and its owner. ``target``:
    only the links to that object; those of a run include the links to its trajectories."""
    links = access.limit(_links())
    if target is not None:
        below = Q(trajectory__run=target) if isinstance(target, Run) else Q()
        links = links.filter(_opens(target) | below)
    return list(links.order_by("-pk")[:limit])


def _opens(target: Shared) -> Q:
    """The links that open an object. A link to a run also opens its trajectories."""
    if isinstance(target, StoredTrajectory):
        return Q(trajectory=target) | Q(run_id=target.run_id)
    return Q(run=target) if isinstance(target, Run) else Q(check_result=target)


def find_share(**column: Any) -> ShareLink | None:
    """The link with that ``pk`` or that ``token_sha256``, with its target and its owner."""
    return _links().filter(**column).first()


def shares_of(target: Shared, keys: Iterable[int]) -> list[ShareLink]:
    """The links with these keys that open the target. A link to a run also opens its trajectories. A link to some
    tokens opens its own page alone, so that it is none of them."""
    return list(_with_makers(ShareLink.objects.filter(_opens(target), pk__in=list(keys), row_index=None)))


def token_hash(token: str) -> str:
    """The hash that a link is found by."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def create_share(
    user: Any,
    target: models.Run | models.StoredTrajectory | models.TemplateCheck,
    query: str = "",
    note: str = "",
    days: float = 30,
    window: tuple[int, int, int] | None = None,
) -> tuple[models.ShareLink, str]:
    """Make a link to a run (with its trajectories), a trajectory or a check. Returns the link and its token.
    ``window``: the index of a row of the trajectory, and the tokens ``[start, stop)`` of it that alone are shown."""
    columns = {models.Run: "run", models.StoredTrajectory: "trajectory", models.TemplateCheck: "check_result"}
    column = columns[type(target)]
    token = secrets.token_urlsafe(24)
    project = (target.run if isinstance(target, models.StoredTrajectory) else target).project
    row_index, start, stop = window or (None, None, None)
    link = models.ShareLink.objects.create(
        row_index=row_index,
        start=start,
        stop=stop,
        token_sha256=token_hash(token),
        hint=token[:6],
        query=query[:500],
        note=note[:500],
        created_by=user,
        project=project,
        expires_at=timezone.now() + timedelta(days=days),
        **{column: target},
    )
    return link, token


def count_opening(link: models.ShareLink) -> None:
    """Count that a link was opened, and when."""
    now = timezone.now()
    models.ShareLink.objects.filter(pk=link.pk).update(n_opened=F("n_opened") + 1, opened_at=now)


def revoke(record: models.ShareLink | models.ApiToken) -> None:
    """From now on the link opens nothing, or the token is refused. Revoking twice keeps the first time."""
    n = type(record).objects.filter(pk=record.pk, revoked_at=None).update(revoked_at=timezone.now())
    record.refresh_from_db()
    if n and isinstance(record, models.ApiToken):
        activity_log.record(Action.TOKEN_REVOKED, record, detail=record.name)
    elif n:
        activity_log.record(Action.SHARE_REVOKED, record)


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
