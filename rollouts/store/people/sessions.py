"""The sessions that an account is logged in with, so that its owner sees and ends them. Django keeps the sessions."""

from datetime import timedelta
from typing import Any

from django.contrib.sessions.models import Session
from django.db import IntegrityError, transaction
from django.db.models import QuerySet
from django.utils import timezone

from rollouts.store.models import LoginSession
from rollouts.store.people.projects import MAX_LISTED
from rollouts.store.text import storable_text

MAX_DROPPED = 10_000
NOTED_EVERY = timedelta(minutes=10)
"""How often the last use of a session is written: a reader of pages must not cost a write for each page."""


def note_session(session_key: str, user: Any, device: str, address: str) -> bool:
    """Write down that a session is in use. Returns False when the session has ended meanwhile."""
    columns = {
        "user": user, "device": storable_text(device)[:200], "address": address[:45], "last_used_at": timezone.now(),
    }
    try:
        with transaction.atomic():
            LoginSession.objects.update_or_create(session_id=session_key, defaults=columns)
    except IntegrityError:  # logged out in another tab
        return False
    return True


def end_sessions(user: Any, key: int | None = None, but: str | None = None) -> int:
    """End sessions of a user: the one with the key ``key``, or all; never that of Django called ``but``. Returns how
    many ended."""
    sessions = LoginSession.objects.filter(user=user)
    if key is not None:
        sessions = sessions.filter(pk=key)
    if but is not None:
        sessions = sessions.exclude(session_id=but)
    ended = [str(key_of_session) for key_of_session in sessions.values_list("session_id", flat=True)]
    Session.objects.filter(session_key__in=ended).delete()
    return len(ended)


def expired_sessions() -> QuerySet[Session]:
    """The sessions that log nobody in any more."""
    return Session.objects.filter(expire_date__lt=timezone.now())


def drop_expired_sessions() -> int:
    """Delete them, at most ``MAX_DROPPED`` at a time. Returns how many rows went."""
    keys = list(expired_sessions().values_list("pk", flat=True)[:MAX_DROPPED])
    return Session.objects.filter(pk__in=keys).delete()[0]


def live_sessions(user: Any) -> list[LoginSession]:
    """The sessions that a user is logged in with, the one used last first."""
    sessions = LoginSession.objects.filter(user=user, session__expire_date__gt=timezone.now())
    return list(sessions.order_by("-last_used_at", "-pk")[:MAX_LISTED])
