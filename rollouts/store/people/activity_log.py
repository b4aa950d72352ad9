"""The activity log: who did what, when, from where. One call writes the row and the line of the log. A door says once
who acts (:func:`acting`). What does the work writes it down, so that no door can forget it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db import DatabaseError, InterfaceError, models, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from rollouts.store.models import (
    ApiToken, AuditEvent, Invitation, Job, Project, Role, Run, ShareLink, StoredTrajectory, TemplateCheck, Tokenizer
)
from rollouts.store.people.access import Access

log = logging.getLogger("inspector.audit")


class Action(StrEnum):
    """What is written down, beside the activity of each kind of job. A value is stored and stays."""

    LOGIN = "login"  # Somebody logged in; the detail says how.
    LOGIN_FAILED = "login failed"
    """A wrong password, a used link, or a refusal of the provider. The name is what was typed."""
    LOGOUT = "logout"  # Somebody logged out.
    PASSWORD_CHANGED = "password changed"  # Somebody changed their password; their other sessions ended.
    SESSION_ENDED = "session ended"  # Somebody ended a session of theirs on another device.
    ACCOUNT_MADE = "account made"  # By an invitation or the first sign-in through a provider.
    ACCOUNT_CHANGED = "account changed"
    """An admin of the server deactivated or activated an account, or changed who is one."""
    PROJECT_MADE = "project made"  # A project was made.
    PROJECT_RENAMED = "project renamed"  # A project was renamed; the detail says from what.
    PROJECT_DELETED = "project deleted"  # An empty project was deleted.
    ROLE_CHANGED = "role changed"  # A member joined, or got another role.
    MEMBER_REMOVED = "member removed"  # A member was removed.
    INVITED = "invitation made"  # A link to join was made.
    INVITATION_REVOKED = "invitation revoked"  # A link to join was revoked.
    JOINED = "invitation used"  # Somebody joined a project by a link.
    SHARED = "share link made"  # A share link was made.
    SHARE_REVOKED = "share link revoked"  # A share link was revoked.
    SHARE_OPENED = "share link opened"  # A browser opened a share link.
    TOKEN_MADE = "API token made"  # An API key was made.
    TOKEN_REVOKED = "API token revoked"  # An API key was revoked.
    LAUNCHED = "run launched"  # A run was launched.
    IMPORTED = "run imported"  # Files were handed in to become a run.
    PUSHED_TO = "run made to push to"  # A program made a run to push to.
    RESUMED = "run resumed"  # Somebody let a run go on that had stopped before its end.
    SCORES_DELETED = "scores deleted"  # A column that an engine had made of a run was deleted; the detail says which.
    TOKENIZER_ADDED = "tokenizer registered"
    """A tokenizer was registered in a project, by its form, with an import, a check or a launch, or by a command."""
    CANCELLED = "work cancelled"  # Somebody asked a run or a job to stop.
    MOVED = "token arrays moved"  # The token arrays of a run were moved to another store.
    DOWNLOADED = "export downloaded"  # A file of a run left the server.
    DELETED = "run deleted"  # A run was deleted.
    RENAMED = "run renamed"  # A run got another name; the detail says from what.
    TAGGED = "run tagged"  # A run got a tag, or lost one; the detail says which.
    COMMENTED = "comment written"  # Somebody wrote a comment on a trajectory; the detail names it.
    COMMENT_CHANGED = "comment changed"  # A comment was edited, resolved or reopened; the detail says which.
    COMMENT_DELETED = "comment deleted"  # A comment was deleted; the detail says whose it was.
    MUTED = "finding muted"  # Somebody muted a kind of finding; the detail says where and why.
    UNMUTED = "finding unmuted"  # Somebody took that back.
    ALARM_CHANGED = "alarm changed"
    """Somebody set the limit of an alarm, switched it off, or took that back; the detail says which."""
    WEBHOOK_CHANGED = "webhook changed"
    """An admin of a project set or removed the webhook of its alarms; the detail names the host."""
    BACKED_UP = "backup made"  # A backup was made; it holds what the database holds.
    RESTORED = "backup restored"  # A backup was restored.


@dataclass(frozen=True)
class Actor:
    """Who acts."""

    user: Any = None  # An account, a name, or None for nobody.
    address: str = ""  # That the request came from; empty = it was no request.
    detail: str = ""  # How, where it was no request.


_actor: ContextVar[Callable[[], Actor]] = ContextVar("actor", default=Actor)


@contextmanager
def acting(who: Callable[[], Actor]) -> Iterator[None]:
    """Inside, ``who`` says who acts. It is asked when something is written down: a login comes after the request."""
    token = _actor.set(who)
    try:
        yield
    finally:
        _actor.reset(token)


_SUBJECTS: dict[type[models.Model], tuple[str, str, str]] = {
    Run: ("run", "code", "name"),
    StoredTrajectory: ("trajectory", "code", "external_id"),
    TemplateCheck: ("check", "code", ""),
    Tokenizer: ("tokenizer", "pk", "name"),
    Job: ("job", "code", "kind"),
    Project: ("project", "code", "name"),
    Invitation: ("invitation", "pk", "hint"),
    ShareLink: ("share link", "pk", "hint"),
    ApiToken: ("API token", "pk", "hint"),
}
"""Model -> what it is called, the column that names it, and the column that describes it."""


def record(action: str, of: models.Model | None = None, *, user: Any = None, detail: str = "") -> None:
    """Write down that this was done to the object ``of``: an :class:`Action`, or the activity of a kind of job.
    ``user``: an account, or a name as it was typed; the default is who acts. Nothing is raised when the row cannot be
    stored: the line of the log says it all the same."""
    actor = _actor.get()()
    user = actor.user if user is None else user
    account = user if getattr(user, "is_authenticated", False) else None
    kind, code, described = _subject(of)
    event = AuditEvent(
        user=account,
        user_name=(account.get_username() if account is not None else user if isinstance(user, str) else "")[:150],
        address=actor.address[:45],
        project_id=_project_of(of),
        action=str(action),
        target=kind,
        code=code,
        detail=": ".join(part for part in (described, detail, actor.detail) if part).replace("\0", "")[:500],
    )
    log.info(
        str(action),
        extra={
            "user": event.user_name, "address": event.address, "project": event.project_id, "target": event.target,
            "object": f"{event.code} {event.detail}".strip(),
        },
    )
    try:
        with transaction.atomic():
            event.save(force_insert=True)
    except (DatabaseError, InterfaceError, ValueError):
        log.exception("the audit log could not be written")


def _subject(of: models.Model | None) -> tuple[str, str, str]:
    if of is None:
        return "", "", ""
    kind, column, described = _SUBJECTS.get(type(of), (of._meta.verbose_name or "", "pk", ""))
    return str(kind), str(getattr(of, column) or "")[:16], str(getattr(of, described, "") or "") if described else ""


def _project_of(of: models.Model | None) -> int | None:
    if isinstance(of, Project):
        return of.pk
    if isinstance(of, Job):
        of = of.subject
    if isinstance(of, StoredTrajectory):
        of = of.run
    return getattr(of, "project_id", None)


def drop_old_events() -> int:
    """Delete what is older than ``INSPECTOR_AUDIT_DAYS``; 0 keeps everything. Returns how many rows went."""
    if not settings.AUDIT_DAYS:
        return 0
    oldest = timezone.now() - timedelta(days=settings.AUDIT_DAYS)
    return AuditEvent.objects.filter(at__lt=oldest).delete()[0]


def activity_events(access: Access, columns: Mapping[str, Any]) -> QuerySet[AuditEvent]:
    """The events of the projects in which somebody is an admin, newest first. An admin of the server sees all.
    ``columns``: of these events alone; an empty value filters nothing."""
    events = access.limit(AuditEvent.objects.select_related("project"), least=Role.ADMIN)
    return events.filter(**{name: value for name, value in columns.items() if value}).order_by("-at", "-id")


def activity_page(access: Access, columns: Mapping[str, Any], before: int | None, limit: int) -> list[AuditEvent]:
    """At most ``limit`` events, those older than the event with the key ``before``. One more query finds that one."""
    events = activity_events(access, columns)
    if before is not None:
        # A hidden event is an unknown one: else the page would tell when it happened.
        at = activity_events(access, {}).filter(pk=before).values_list("at", flat=True).first()
        events = events.filter(pk__lt=before) if at is None else events.filter(Q(at__lt=at) | Q(at=at, pk__lt=before))
    return list(events[:limit])


def activity_rows(access: Access, columns: Mapping[str, Any]) -> Iterator[AuditEvent]:
    """All these events, newest first, a part at a time."""
    return activity_events(access, columns).iterator(chunk_size=2000)
