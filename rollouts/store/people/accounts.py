"""Accounts: those that the product itself makes, and the list of all."""

from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser, User
from django.db import IntegrityError
from django.db.models import Count

from rollouts.store.people.projects import MAX_LISTED

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
