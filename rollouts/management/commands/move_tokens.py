"""Move the token arrays of a run into the database or into segments.

Segments are Parquet files of the file storage. The run can be read meanwhile. A move that broke off goes on when the
command is given again.
"""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.outputs import show_progress
from rollouts.jobs.storage.token_moves import move_run
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_named
from rollouts.store.files import StorageDown
from rollouts.store.people.activity_log import Action, record
from rollouts.store.runs.runs import count_active
from rollouts.store.token_arrays import STORES


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN")
        parser.add_argument("--to", required=True, choices=list(STORES))

    def handle(self, *_: Any, **options: Any) -> None:
        run = run_named(options["run"])
        n_moved = 0
        try:
            for last, n in move_run(run, options["to"]):
                n_moved += n
                show_progress(f"{last.index + 1:,} of {run.n_trajectories:,} trajectories")
        except StorageDown as error:
            raise CommandError(f"{error} {n_moved:,} arrays are moved. Give the command again to go on.") from error
        show_progress("", "\r")
        record(Action.MOVED, run, detail=f"to {options['to']}")
        self.stdout.write(f"{n_moved:,} steps and rows of run {run.code} moved to {options['to']}.")
        growing = count_active(run)
        if growing:
            self.stdout.write(f"{growing:,} trajectories still grow. Give the command again when the run has ended.")
