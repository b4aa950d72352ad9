"""Load the gallery: one short trajectory for each kind of finding worth seeing.

Once; then it is found again.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management import CommandError

from rollouts.jobs import gallery
from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, project_named
from rollouts.management.jobs import run_jobs
from rollouts.store.database import reload
from rollouts.store.models import Project, Run
from rollouts.store.runs.gallery import gallery_trajectories


class Command(TerminalCommand):
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
        codes = [trajectory.code for trajectory in gallery_trajectories(run)]
        values = {"run": run.code, "trajectories": codes, "findings": run.finding_counts}
        line = f"Run {run.code}: {len(codes)} trajectories, {len(run.finding_counts)} kinds of findings."
        self.print_result(options["json"], values, line)

    def _load_training(self, project: Project, as_json: bool) -> None:
        with run_jobs() as jobs:
            loaded = gallery.import_training(project)
            jobs += [job for _, _, job in loaded if job is not None]
        for _, run, _ in loaded:
            reload(run)
        lines = (f"Run {run.code}: {run.name}, {run.n_trajectories} trajectories." for _, run, _ in loaded)
        self.print_result(as_json, {training.name: run.code for training, run, _ in loaded}, lines)
        if failed := next((run for _, run, _ in loaded if run.status == Run.Status.FAILED), None):
            raise CommandError(f"{failed.name}: {failed.error}")
