"""The project that takes what is made."""

from __future__ import annotations

from rollouts.store.models import Project, default_project


def key_of(project: Project | None) -> int:
    """The key of a project; None = of the default one, which takes what notebooks and tests make without a project."""
    return default_project() if project is None else project.pk


def project_or_default(project: Project | None = None) -> Project:
    """The project itself; None = the default one."""
    return project or Project.objects.get(pk=default_project())
