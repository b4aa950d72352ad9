"""API tokens, by which a trainer pushes. The token is shown once; only its hash is kept."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from rollouts import models
from rollouts.services.shares import token_hash

PREFIX = "ri_"
"""Prefix by which a token is recognised in a log or a repository."""
LAST_USE_EVERY = timedelta(minutes=1)
MAX_CHARACTERS = 200


def create_api_token(user: Any, name: str = "") -> tuple[models.ApiToken, str]:
    """Make a token that writes as this user. Returns the record and the token itself."""
    token = PREFIX + secrets.token_urlsafe(32)
    record = models.ApiToken.objects.create(
        token_sha256=token_hash(token),
        hint=token[:8],
        name=name.strip()[:200] or "unnamed",
        created_by=user,
        scopes=[models.ApiToken.Scope.PUSH],
    )
    return record, token


def find_api_token(token: str) -> models.ApiToken | None:
    """The record of a valid token; None = it is unknown or revoked, or its user may no longer log in."""
    if not token or len(token) > MAX_CHARACTERS:
        return None
    live = models.ApiToken.objects.filter(revoked_at=None, created_by__is_active=True)
    record = live.select_related("created_by", "project").filter(token_sha256=token_hash(token)).first()
    if record is not None:
        now = timezone.now()
        # Once a minute at most: a trainer that pushes every second must not cost a write each time.
        if record.last_used_at is None or record.last_used_at < now - LAST_USE_EVERY:
            models.ApiToken.objects.filter(
                Q(last_used_at=None) | Q(last_used_at__lt=now - LAST_USE_EVERY), pk=record.pk
            ).update(last_used_at=now)
    return record
