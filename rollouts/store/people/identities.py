"""Accounts of people whom an OpenID Connect provider names. Issuer and subject find them, never name or email."""

import re
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from rollout_inspector.refusal import Refusal
from rollouts.store.models import ExternalIdentity, Membership
from rollouts.store.people.accounts import LOCAL_USER
from rollouts.store.people.projects import find_project
from rollouts.store.text import storable_text

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
    subject, name = _subject(claims), _wanted_name(claims)
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


def _wanted_name(claims: Mapping[str, Any]) -> str:
    """A name for a new account, of the characters that names have here."""
    name = claims.get("preferred_username") or str(claims.get("email", "")).partition("@")[0] or claims["sub"]
    return re.sub(r"[^\w.@+-]", "-", storable_text(str(name)))[:100] or "person"


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
