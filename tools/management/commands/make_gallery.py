"""Sample and plant the trajectories of the gallery again, and write them to a file.

It takes about a minute.
"""

import gzip
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.formats.readers.inspector_jsonl import encode
from rollouts.gallery import BUNDLE, SHARED, STEPS, TRAINING_RUNS
from rollouts.management import TerminalCommand


class Command(TerminalCommand):
    # The policy and the diagnosis need neither a database nor correct settings.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--output", type=Path, default=BUNDLE, help="file to write (default: the one in the repository)"
        )
        parser.add_argument("--only", nargs="*", default=(), metavar="KIND", help="make these alone (default: all)")
        parser.add_argument(
            "--training", action="store_true", help="train the bundled runs of GRPO (some minutes); --only takes names"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if options["training"]:
            self._train(options["only"])
            return
        from tools.gallery.make import make  # torch takes seconds to import

        n = make(options["output"], self.stdout.write, options["only"])
        self.stdout.write(f"{n} trajectories are in {options['output']}.", self.style.SUCCESS)

    def _train(self, only: Sequence[str]) -> None:
        names = [run.name for run in TRAINING_RUNS]
        if unknown := [name for name in only if name not in names]:
            raise CommandError(f"There is no run of training named {unknown[0]!r}; there are {', '.join(names)}.")
        from tools.demo_policy.grpo import GrpoSettings, train

        for run in TRAINING_RUNS:
            if only and run.name not in only:
                continue
            lines = []
            for step in train(GrpoSettings(STEPS, threads=1, **{**SHARED, **run.fault})):
                lines += [encode(trajectory) for trajectory in step.trajectories]
            run.path.parent.mkdir(exist_ok=True)
            run.path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", 9, mtime=0))
            self.stdout.write(f"{len(lines)} trajectories are in {run.path}.", self.style.SUCCESS)
