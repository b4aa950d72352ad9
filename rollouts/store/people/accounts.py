"""Accounts: those that the product makes, and those of people whom an OpenID Connect provider names, whom issuer and
subject find, never name or email. Also the sessions that an account is logged in with; Django keeps the sessions."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser, User
from django.contrib.sessions.models import Session
from django.db import IntegrityError, transaction
from django.db.models import Count, QuerySet
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.store.models import ExternalIdentity, LoginSession, Membership
from rollouts.store.people.members import MAX_LISTED, find_project
from rollouts.store.text import storable_text

LOCAL_USER = "local"


def find_account(pk: int) -> Any | None:
    """The account with that key."""
    return get_user_model().objects.filter(pk=pk).first()


def server_admins() -> set[str]:
    """The names of the admins of the server. One query."""
    return set(get_user_model().objects.filter(is_superuser=True).values_list("username", flat=True))


def all_accounts(text: str = "") -> list[Any]:
    """The accounts by name, each with ``n_projects``. ``text``: a part of the name."""
    accounts = get_user_model().objects.annotate(n_projects=Count("memberships")).order_by("username")
    return list(accounts.filter(username__icontains=text)[:MAX_LISTED] if text else accounts[:MAX_LISTED])


def local_user() -> AbstractBaseUser:
    """The account behind the login links, made on first use: an admin of the server, without a password."""
    user, created = get_user_model().objects.get_or_create(
        username=LOCAL_USER, defaults={"is_staff": True, "is_superuser": True}
    )
    if created:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user


def account_named(name: str) -> AbstractBaseUser | None:
    """The account of that name; the local one is made on first use."""
    return local_user() if name == LOCAL_USER else get_user_model().objects.filter(username=name).first()


def active_user(name: str) -> User | None:
    """The account of that name if it may log in; the local one is made on first use."""
    user = account_named(name)
    return user if isinstance(user, User) and user.is_active else None


def make_account(name: str, password: str) -> User:
    """A new account with a password that was validated before. Raises ``IntegrityError`` when the name is taken. The
    name of the local account is taken from the beginning: whoever had it would get what commands give that account."""
    if name.lower() == LOCAL_USER:
        raise IntegrityError(f"the name {name} belongs to this server")
    return User.objects.create_user(name, password=password)


def has_server_admin() -> bool:
    """Whether an account that may log in is an admin of the server; the local one of login links does not count."""
    admins = get_user_model().objects.filter(is_superuser=True, is_active=True)
    return admins.exclude(username=LOCAL_USER).exists()


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


MAX_SUBJECT = 255
MAX_TRIES = 50  # How many names are tried for a new account whose name is taken.


class SignInRefused(Refusal):
    """The person whom the provider names may not sign in here. The message is a sentence for that person."""

    def __init__(self, sentence: str, name: str = "") -> None:
        super().__init__(sentence)
        self.name = name


def is_allowed(claims: Mapping[str, Any]) -> bool:
    """Whether `INSPECTOR_OIDC_ALLOWED` lets in whom these claims describe. An entry with `@` in front is the domain of
    an email address that the provider has verified. Any other entry is a name in the claim `groups`. Without entries
    everybody of the provider is let in."""
    if not settings.OIDC_ALLOWED:
        return True
    groups = claims.get("groups")
    # A group whose name begins like a domain is none: who makes groups would choose the domain.
    memberships = (
        {str(group) for group in groups if not str(group).startswith("@")} if isinstance(groups, list) else set()
    )
    if claims.get("email_verified") is True and "@" in str(claims.get("email", "")):
        memberships.add("@" + str(claims["email"]).rpartition("@")[2].lower())
    return any((entry.lower() if entry.startswith("@") else entry) in memberships for entry in settings.OIDC_ALLOWED)


def _subject(claims: Mapping[str, Any]) -> str:
    subject = storable_text(str(claims["sub"]))
    if len(subject) > MAX_SUBJECT:
        raise SignInRefused("The provider names you in a way that is too long. Tell the administrator of this server.")
    return subject


def account_of(issuer: str, claims: Mapping[str, Any]) -> tuple[User, bool]:
    """The account of the person whom verified claims describe, and whether it was made now. A new account has no
    project until it is invited, unless `INSPECTOR_OIDC_DEFAULT_PROJECT` names one. Raises ``SignInRefused``."""
    subject = _subject(claims)
    title = claims.get("preferred_username") or str(claims.get("email", "")).partition("@")[0] or claims["sub"]
    name = re.sub(r"[^\w.@+-]", "-", storable_text(str(title)))[:100] or "person"  # of the characters that names have
    if not is_allowed(claims):
        raise SignInRefused(
            "This server lets in certain groups or email domains of the provider, and you are in none of them. Ask "
            "its administrator.", name,
        )
    account = _found(issuer, subject)
    if account is None:
        try:
            with transaction.atomic():
                return _make(issuer, subject, name, claims), True
        except IntegrityError:  # the same person signed in twice at once
            account = _found(issuer, subject)
            if account is None:
                raise
    if not account.is_active:
        raise SignInRefused("Your account on this server is closed. Ask its administrator.", account.get_username())
    return account, False


def _found(issuer: str, subject: str) -> User | None:
    identity = ExternalIdentity.objects.select_related("user").filter(issuer=issuer, subject=subject).first()
    return None if identity is None else identity.user


def link_identity(user: Any, issuer: str, claims: Mapping[str, Any]) -> None:
    """Link an account with the person whom verified claims describe. Raises ``SignInRefused`` when that person is
    linked with another account."""
    if not is_allowed(claims):
        raise SignInRefused("This server does not let in whom the provider names.", user.get_username())
    try:
        with transaction.atomic():
            identity, _ = ExternalIdentity.objects.get_or_create(
                issuer=issuer, subject=_subject(claims), defaults={"user": user}
            )
    except IntegrityError:
        raise SignInRefused("Try once more.", user.get_username()) from None
    if identity.user_id != user.pk:
        raise SignInRefused("Another account of this server signs in as that person already.", user.get_username())


def _make(issuer: str, subject: str, wanted: str, claims: Mapping[str, Any]) -> User:
    users = get_user_model().objects
    for number in range(1, MAX_TRIES + 1):
        name = User.normalize_username(wanted if number == 1 else f"{wanted}-{number}")
        # No account that exists is taken over, whatever its name: the name only gets a number.
        if name.lower() != LOCAL_USER and not users.filter(username__iexact=name).exists():
            break
    else:
        raise SignInRefused(f"Too many accounts are called {wanted}. Tell the administrator of this server.", wanted)
    user = users.create_user(name)
    user.email = storable_text(str(claims.get("email", "")))[:254] if claims.get("email_verified") is True else ""
    user.save(update_fields=["email"])
    ExternalIdentity.objects.create(user=user, issuer=issuer, subject=subject)
    project = find_project(settings.OIDC_DEFAULT_PROJECT)
    if project is not None:
        Membership.objects.create(project=project, user=user, role=settings.OIDC_DEFAULT_ROLE)
    return user
