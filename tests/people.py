"""Users with a role in a project."""

from typing import Any

from django.contrib.auth import get_user_model

from rollouts.store.models import Membership, Project, Role, default_project


def the_default_project() -> Project:
    """The project that takes what names no other one."""
    return Project.objects.get(pk=default_project())


def make_member(name: str, role: Role = Role.ADMIN, project: Project | None = None, **fields: Any) -> Any:
    """A user with that role in a project; None = the default one, which holds what a test makes without a project."""
    user = get_user_model().objects.create_user(name, **fields)
    key = default_project() if project is None else project.pk
    Membership.objects.create(project_id=key, user=user, role=role)
    return user
