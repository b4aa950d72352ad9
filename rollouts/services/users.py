"""The accounts that the product itself makes."""

from django.contrib.auth import get_user_model
from django.contrib.auth.models import AbstractBaseUser

LOCAL_USER = "local"


def local_user() -> AbstractBaseUser:
    """The account behind the login links, made on first use: an admin of the server, without a password."""
    user, created = get_user_model().objects.get_or_create(
        username=LOCAL_USER, defaults={"is_staff": True, "is_superuser": True}
    )
    if created:
        user.set_unusable_password()
        user.save(update_fields=["password"])
    return user
