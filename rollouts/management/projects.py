"""The option ``--project`` of commands that make something. A command acts as the operator, who may do everything."""

from __future__ import annotations

from argparse import ArgumentParser

from django.core.management.base import CommandError

from rollouts.models import Project, default_project


def add_project_option(parser: ArgumentParser) -> None:
    """Adds ``--project NAME``."""
    parser.add_argument(
        "--project", default="", metavar="NAME", help="name or code of the project (default: the default project)"
    )


def project_named(name: str) -> Project:
    """The project with that name or code; empty = the default one. Raises :class:`CommandError`."""
    if not name:
        return Project.objects.get(pk=default_project())
    found = Project.objects.filter(name=name).first() or Project.objects.filter(code=name).first()
    if found is None:
        names = ", ".join(Project.objects.order_by("name").values_list("name", flat=True)[:10])
        raise CommandError(f"There is no project {name!r}. There are: {names}.")
    return found
