"""Share links. The token is shown once; only its hash is kept."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta
from typing import Any

from django.db.models import F
from django.utils import timezone

from rollouts.store import models
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action


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

    ``window``: the index of a row of the trajectory, and the tokens ``[start, stop)`` of it that alone are shown.
    """
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
