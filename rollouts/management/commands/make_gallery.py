"""``manage.py make_gallery``: makes the bundled trajectories of the gallery again."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from rollouts.gallery import BUNDLE
from rollouts.management import TerminalCommand


class Command(TerminalCommand):
    help = "Sample and plant the trajectories of the gallery (about a minute) and write them to a file."
    # The policy and the diagnosis need neither a database nor correct settings.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--output", type=Path, default=BUNDLE, help="file to write (default: the one in the repository)"
        )
        parser.add_argument("--only", nargs="*", default=(), metavar="KIND", help="make these alone (default: all)")

    def handle(self, *args: Any, **options: Any) -> None:
        from rollouts.gallery.make import make  # torch takes seconds to import

        n = make(options["output"], self.stdout.write, options["only"])
        self.stdout.write(f"{n} trajectories are in {options['output']}.", self.style.SUCCESS)
