"""Measure what each kind of finding of the gallery does to the gradient of the demo policy, and write the case study.

It takes about a minute.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings

from rollouts.jobs.gallery import trajectories
from rollouts.management import TerminalCommand


class Command(TerminalCommand):
    # The policy and the diagnosis need neither a database nor correct settings.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--output", type=Path, default=Path(settings.BASE_DIR) / "docs/damage.md",
            help="page whose table is written (default: the one in the repository)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        from tools.gallery.damage import damages, table, written  # torch takes seconds to import
        from tools.gallery.sampling import Policy

        lines = list(damages(Policy(), trajectories(), self.stdout.write))
        page: Path = options["output"]
        page.write_text(written(page.read_text(), table(lines)))
        self.stdout.write(f"{len(lines)} lines are in {page}.", self.style.SUCCESS)
