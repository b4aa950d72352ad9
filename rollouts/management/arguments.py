"""What arguments of commands name: a project, a run, a file. A command acts as the operator, who may do everything."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from django.db.models import QuerySet

from rollout_inspector.commands.tokenizer_options import template_text
from rollout_inspector.text.chat_templates import cannot_render, is_renderer, renderer
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import ChatTemplate, Project, Run, StoredTrajectory
from rollouts.store.people.members import find_project_named, project_names, project_or_default
from rollouts.store.runs.runs import find_run, run_and_trajectories
from rollouts.store.trajectories.trajectories import find_trajectory


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
        names = ", ".join(project_names(10))
        raise CommandError(f"There is no project {name!r}. There are: {names}.")
    return project


def run_named(code: str, templates: bool = False) -> Run:
    """The run with that code, with its ``templates`` if they are asked for. Raises :class:`CommandError`."""
    run = find_run(templates=templates, code=code)
    if run is None:
        raise CommandError(f"There is no run with the code {code!r}.")
    return run


def run_and_trajectories_named(code: str) -> tuple[Run, QuerySet[StoredTrajectory]]:
    """The run with a code and its trajectories, or the trajectory with the code. Raises :class:`CommandError`."""
    if (target := run_and_trajectories(code)) is None:
        raise CommandError(f"There is no run and no trajectory with the code {code!r}.")
    return target


def trajectory_named(code: str) -> StoredTrajectory:
    """The trajectory with that code. Raises :class:`CommandError`."""
    if (trajectory := find_trajectory(code)) is None:
        raise CommandError(f"There is no trajectory with the code {code!r}.")
    return trajectory


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The JSON object of an option; empty without a text. Raises :class:`CommandError`."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{option}: This is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CommandError(f"{option}: This must be one JSON object.")
    return value


def read_chat_template(path: str | Path) -> str:
    """A chat template that renders, or the name of a renderer as it is kept. Raises :class:`CommandError` with the line
    that cannot be used, and :class:`Refusal`."""
    text = template_text(path, "The chat template")
    if not is_renderer(text) and (problem := cannot_render(renderer(None, text))):
        raise CommandError(f"The chat template {path} cannot be used. {problem} Mend it, or name another file.")
    return text


def registered_chat_template(path: str | Path, project: Project) -> ChatTemplate:
    """The same template, stored in a project under the file's name."""
    return register_chat_template(read_chat_template(path), Path(path).stem, project)
