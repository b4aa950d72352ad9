"""Two projects, and people with each role in the first one."""

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from rollouts.store.models import Membership, Project, Role

PASSWORD = "correct horse battery"


def person(name: str, project: Project | None = None, role: Role | None = None, **more: Any) -> tuple[Any, Client]:
    """An account, and a browser that is logged in with it."""
    user = get_user_model().objects.create_user(name, password=PASSWORD, **more)
    if project is not None and role is not None:
        Membership.objects.create(project=project, user=user, role=role)
    client = Client()
    client.force_login(user)
    return user, client


@pytest.fixture
def ours(db: Any) -> Project:
    return Project.objects.create(name="maths")


@pytest.fixture
def theirs(db: Any) -> Project:
    return Project.objects.create(name="secret project")


@pytest.fixture
def admin(ours: Project) -> Client:
    """A browser of an admin of the project `maths`."""
    return person("ada", ours, Role.ADMIN)[1]


@pytest.fixture
def root(db: Any) -> Client:
    """A browser of an admin of the server."""
    return person("root", is_superuser=True, is_staff=True)[1]
