"""``manage.py train_demo_policy``: trains the demo policy again."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollouts.demo_policy import MODEL_DIR, STEPS
from rollouts.management import TerminalCommand


class Command(TerminalCommand):
    help = "Train the demo policy on calculator dialogues (about 20 minutes on two cores) and write it to a folder."
    # Training needs neither a database nor correct settings.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--output", type=Path, default=MODEL_DIR, help="folder to write (default: the model in the repository)"
        )
        parser.add_argument("--steps", type=int, default=STEPS, help="batches of 48 dialogues (default: %(default)s)")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["steps"] < 1:
            raise CommandError("--steps must be at least 1.")
        if options["threads"] < 1:
            raise CommandError("--threads must be at least 1.")
        # Torch takes seconds to import. It is imported here so that --help and the other commands stay quick.
        from rollouts.demo_policy.train import train

        def say(line: str) -> None:
            self.stdout.write(line)
            self.stdout.flush()

        train(options["output"], options["steps"], options["seed"], options["threads"], say)
        self.stdout.write(f"The demo policy is in {options['output']}.", self.style.SUCCESS)
