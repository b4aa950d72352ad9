"""The option ``--project`` of commands that make something. A command acts as the operator, who may do everything."""

from __future__ import annotations

from argparse import ArgumentParser

from django.core.management.base import CommandError

from rollouts.store.models import Project
from rollouts.store.people.people import find_project_named
from rollouts.store.people.projects import project_or_default


def add_project_option(parser: ArgumentParser, default: str = "the default project") -> None:
    """Adds ``--project NAME``. ``default``: what no name means, in words."""
    parser.add_argument(
        "--project", default="", metavar="NAME", help=f"name or code of the project (default: {default})"
    )


def project_named(name: str) -> Project:
    """The project with that name or code; empty = the default one. Raises :class:`CommandError`."""
    if not name:
        return project_or_default()
    project = find_project_named(name)
    if project is None:
        names = ", ".join(Project.objects.order_by("name").values_list("name", flat=True)[:10])
        raise CommandError(f"There is no project {name!r}. There are: {names}.")
    return project
