"""Loading the gallery: the bundled trajectories become a run of a project, once."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from django.db import transaction

from rollouts import services
from rollouts.demo_policy import MODEL_DIR
from rollouts.formats import Source, read
from rollouts.gallery import BUNDLE, chat_templates
from rollouts.models import Project, Run
from rollouts.selectors.gallery import KEY, find_gallery
from rollouts.services.audit import Action, record
from rollouts.services.projects import project_or_default
from rollouts.tito.trajectory import Trajectory
from rollouts.work.diagnosis import diagnosis_for
from rollouts.work.launch import ServedModel, model_tokenizer

NAME = "See what breaks"


@cache
def version() -> str:
    """A hash of the bundle. A run of another version is not the gallery any more."""
    return hashlib.sha256(BUNDLE.read_bytes()).hexdigest()[:16]


def load(project: Project | None = None, user: Any = None) -> Run:
    """The run that holds the gallery in a project; made when there is none. ``project``: None = the default one.

    Takes part of a second. Two that load at the same time get the same run.
    """
    project = project_or_default(project)
    if (there := find_gallery(version(), project)) is not None:
        return there
    tokenizer = model_tokenizer(ServedModel("demo", "", str(MODEL_DIR)), project)
    for name, text in chat_templates().items():
        services.register_chat_template(text, f"gallery: {name.replace('_', ' ')}", project)
    fields = {
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
        "format": "own_jsonl",
        "token_store": "database",
        "settings": {KEY: version()},
    }
    bundled = trajectories()
    # The diagnosis needs the run's tokenizer and templates alone, so that nothing is locked while it works.
    draft = Run(project=project, kind=Run.Kind.IMPORT, **fields)
    found = [diagnosis_for(one, draft) for one in bundled]
    with transaction.atomic():
        Project.objects.select_for_update().get(pk=project.pk)  # a second one waits here, and then finds the run
        if (there := find_gallery(version(), project)) is not None:
            return there
        run = services.create_run(Run.Kind.IMPORT, NAME, user=user, project=project, **fields)
        services.start_run(run)
        records = services.save_trajectories(
            run, bundled, [one.findings for one in found], checks=[one.checks for one in found],
            token_table=services.byte_table_of(run),
        )  # fmt: skip
        services.keep_retokenized(run, [(one.pk, made.again) for one, made in zip(records, found, strict=True)])
        services.end_run(run, Run.Status.DONE)
    run.refresh_from_db()
    record(Action.IMPORTED, run)
    return run


def trajectories() -> list[Trajectory]:
    """The bundled trajectories, in the order of the gallery."""
    return [one for one in read(Source.of_path(BUNDLE))[1] if isinstance(one, Trajectory)]
