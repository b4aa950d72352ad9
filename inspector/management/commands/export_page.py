"""Write a trajectory, or one of its findings, to one HTML file that opens without a server."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from inspector.trajectories.discussion import CommentValues
from inspector.trajectories.offline_page import offline_file
from inspector.trajectories.place import View
from rollouts.management import TerminalCommand
from rollouts.store.trajectories.comments import comments_of
from rollouts.store.trajectories.trajectories import find_trajectory


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("trajectory", metavar="TRAJECTORY", help="the code of a trajectory")
        parser.add_argument("--row", metavar="N", help="this row alone, counted from 0 (default: all that fit)")
        parser.add_argument(
            "--finding", metavar="N", help="this finding alone, counted from 1, and the tokens around it"
        )
        parser.add_argument(
            "--view", choices=[view.value for view in View], help="text in runs, or an element per token"
        )
        parser.add_argument("--lens", help="what the fill of a token shows (default: its origin)")
        parser.add_argument("--no-comments", action="store_true", help="leave out what people wrote about it")
        parser.add_argument("-o", "--output", required=True, metavar="FILE")
        parser.add_argument("--json", action="store_true", help="print a JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        trajectory = find_trajectory(options["trajectory"])
        if trajectory is None:
            raise CommandError(f"There is no trajectory with the code {options['trajectory']!r}.")
        asked = {name: options[name] for name in ("row", "finding", "view", "lens") if options[name] is not None}
        held = [] if options["no_comments"] else comments_of(trajectory)
        made = offline_file(trajectory, asked, [CommentValues.to_read(one) for one in held])
        target = Path(options["output"])
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            n_bytes = draft.write_bytes(made.html.encode())
            os.replace(draft, target)
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror}.") from error
        finally:
            draft.unlink(missing_ok=True)
        if options["json"]:
            rows = [dict(zip(("row", "start", "stop", "n_tokens"), part, strict=True)) for part in made.rows]
            found = {"trajectory": trajectory.code, "file": str(target), "bytes": n_bytes, "rows": rows}
            self.stdout.write(json.dumps({**found, "findings": made.findings, "complete": made.is_whole}))
            return
        parts = "; ".join(f"row {row}, tokens {start:,}-{stop:,} of {n:,}" for row, start, stop, n in made.rows)
        more = "" if made.is_whole else " The file does not hold all of the trajectory, and says so."
        self.stdout.write(f"{n_bytes:,} bytes written to {target}: {parts or 'no tokens'}.{more}")
