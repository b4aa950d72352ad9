"""``manage.py load_gallery``: puts the bundled trajectories of the gallery into a project."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from django.core.management import CommandError
from django.db import transaction

from rollouts.jobs import gallery
from rollouts.management import TerminalCommand
from rollouts.management.projects import add_project_option, project_named
from rollouts.store.jobs.jobs import take_job
from rollouts.store.models import Project, Run
from rollouts.store.people.gallery import gallery_trajectories
from rollouts.worker.jobs import work_on


class Command(TerminalCommand):
    help = "Load the gallery: one short trajectory for each kind of finding worth seeing. Once; then it is found again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_project_option(parser)
        parser.add_argument(
            "--training",
            action="store_true",
            help="load the runs of training instead: a clean one and four with a fault",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        if options["training"]:
            self._load_training(project_named(options["project"]), options["json"])
            return
        run = gallery.load(project_named(options["project"]))
        codes = [one.code for one in gallery_trajectories(run)]
        if options["json"]:
            found = {"run": run.code, "trajectories": codes, "findings": run.finding_counts}
            self.stdout.write(json.dumps(found))
        else:
            self.stdout.write(
                f"Run {run.code}: {len(codes)} trajectories, {len(run.finding_counts)} kinds of findings."
            )

    def _load_training(self, project: Project, as_json: bool) -> None:
        with transaction.atomic():  # no worker sees the jobs before they are taken here
            found = [
                (one, run, take_job(job.pk) if job is not None else None)
                for one, run, job in gallery.import_training(project)
            ]
        for _, _, job in found:
            if job is not None:
                work_on(job)
        for _, run, _ in found:
            run.refresh_from_db()
            if not as_json:
                self.stdout.write(f"Run {run.code}: {run.name}, {run.n_trajectories} trajectories.")
        if as_json:
            self.stdout.write(json.dumps({one.name: run.code for one, run, _ in found}))
        if failed := next((run for _, run, _ in found if run.status == Run.Status.FAILED), None):
            raise CommandError(f"{failed.name}: {failed.error}")
