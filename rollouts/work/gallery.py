"""Loading the gallery: the bundled trajectories become a run of a project, once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction

from rollouts import services
from rollouts.demo_policy import MODEL_DIR
from rollouts.formats import Source, read
from rollouts.gallery import BUNDLE, chat_templates
from rollouts.gallery.training_runs import TRAINING_RUNS, TrainingRun
from rollouts.models import Job, Project, Run
from rollouts.selectors.gallery import KEY, TRAINING_KEY, find_gallery
from rollouts.services.activity_log import Action, record
from rollouts.services.projects import project_or_default
from rollouts.tito.trajectory import Trajectory
from rollouts.work.diagnosis import diagnosis_for
from rollouts.work.imports import ask_for_uploads
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


def import_training(project: Project | None = None, user: Any = None) -> list[tuple[TrainingRun, Run, Job | None]]:
    """The bundled runs of training in a project, each with the job that imports it; None = it is there already.

    ``project``: None = the default one. The jobs wait: :func:`rollouts.work.imports.send_import` sends them.
    """
    project = project_or_default(project)
    tokenizer = model_tokenizer(ServedModel("demo", "", str(MODEL_DIR)), project)
    found: list[tuple[TrainingRun, Run, Job | None]] = []
    for one in TRAINING_RUNS:
        body = one.path.read_bytes()
        mark = {TRAINING_KEY: hashlib.sha256(body).hexdigest()[:16]}
        with transaction.atomic():
            Project.objects.select_for_update().get(pk=project.pk)  # a second one waits here, and then finds the run
            there = Run.objects.filter(project=project, **{f"settings__{TRAINING_KEY}": mark[TRAINING_KEY]})
            run = there.exclude(status__in=(Run.Status.FAILED, Run.Status.CANCELLED)).first()
            if run is not None:
                found.append((one, run, None))
                continue
            run = services.create_run(
                Run.Kind.IMPORT, one.title, user=user, project=project, settings=mark, tokenizer=tokenizer,
                chat_template=tokenizer.chat_template,
            )  # fmt: skip
            found.append((one, run, ask_for_uploads(run, [SimpleUploadedFile(one.path.name, body)])))
    return found


def trajectories() -> list[Trajectory]:
    """The bundled trajectories, in the order of the gallery."""
    return list(_values(BUNDLE))


def _values(path: Path) -> Iterator[Trajectory]:
    return (one for one in read(Source.of_path(path))[1] if isinstance(one, Trajectory))
