"""Loading the gallery: the bundled trajectories become a run of a project, once."""

import hashlib
from functools import cache
from typing import Any

from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction

from rollout_inspector.formats import Source, read
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.gallery import BUNDLE, TRAINING_RUNS, TrainingRun, chat_templates
from rollouts.jobs.diagnosis import diagnosis_for
from rollouts.jobs.imports.imports import ask_for_uploads
from rollouts.jobs.launch import ServedModel, model_tokenizer
from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.database import reload
from rollouts.store.models import Job, Project, Run
from rollouts.store.people.activity_log import Action, record
from rollouts.store.people.members import lock_project, project_or_default
from rollouts.store.runs.gallery import KEY, TRAINING_KEY, find_gallery, find_training_run
from rollouts.store.runs.runs import create_run, end_run, start_run
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.save_trajectories import save_trajectories

NAME = "See what breaks"


@cache
def version() -> str:
    """A hash of the bundle. A run of another version is not the gallery any more."""
    return hashlib.sha256(BUNDLE.read_bytes()).hexdigest()[:16]


def load(project: Project | None = None, user: Any = None) -> Run:
    """The run that holds the gallery in a project; made when there is none. ``project``: None = the default one. Takes
    part of a second. Two that load at the same time get the same run."""
    project = project_or_default(project)
    if (there := find_gallery(version(), project)) is not None:
        return there
    tokenizer = model_tokenizer(ServedModel("demo", "", str(MODEL_DIR)), project)
    for name, text in chat_templates().items():
        register_chat_template(text, f"gallery: {name.replace('_', ' ')}", project)
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
    diagnoses = [diagnosis_for(trajectory, draft) for trajectory in bundled]
    with transaction.atomic():
        lock_project(project)  # a second one waits here, and then finds the run
        if (there := find_gallery(version(), project)) is not None:
            return there
        run = create_run(Run.Kind.IMPORT, NAME, user=user, project=project, **fields)
        start_run(run)
        records = save_trajectories(
            run, bundled, [diagnosis.findings for diagnosis in diagnoses],
            checks=[diagnosis.checks for diagnosis in diagnoses], token_table=byte_table_of(run),
        )
        again = [(record.pk, diagnosis.again) for record, diagnosis in zip(records, diagnoses, strict=True)]
        keep_retokenized(run, again)
        end_run(run, Run.Status.DONE)
    reload(run)
    record(Action.IMPORTED, run)
    return run


def import_training(project: Project | None = None, user: Any = None) -> list[tuple[TrainingRun, Run, Job | None]]:
    """The bundled runs of training in a project, each with the job that imports it; None = it is there already.
    ``project``: None = the default one. The jobs wait: :func:`rollouts.jobs.imports.imports.send_import` sends them."""
    project = project_or_default(project)
    tokenizer = model_tokenizer(ServedModel("demo", "", str(MODEL_DIR)), project)
    imported: list[tuple[TrainingRun, Run, Job | None]] = []
    for training in TRAINING_RUNS:
        body = training.path.read_bytes()
        mark = {TRAINING_KEY: hashlib.sha256(body).hexdigest()[:16]}
        with transaction.atomic():
            lock_project(project)  # a second one waits here, and then finds the run
            if (run := find_training_run(mark[TRAINING_KEY], project)) is not None:
                imported.append((training, run, None))
                continue
            run = create_run(
                Run.Kind.IMPORT, training.title, user=user, project=project, settings=mark, tokenizer=tokenizer,
                chat_template=tokenizer.chat_template,
            )
            imported.append((training, run, ask_for_uploads(run, [SimpleUploadedFile(training.path.name, body)])))
    return imported


def trajectories() -> list[Trajectory]:
    """The bundled trajectories, in the order of the gallery."""
    return [item for item in read(Source.of_path(BUNDLE))[1] if isinstance(item, Trajectory)]
