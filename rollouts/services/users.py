"""The accounts that the product itself makes."""

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser


def user_without_password(name: str) -> AbstractBaseUser:
    """The account of that name, made on first use. Nobody logs in to it with a password."""
    user, created = get_user_model().objects.get_or_create(username=name)
    if created:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user
