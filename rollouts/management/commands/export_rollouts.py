"""Write the finished trajectories of a run to a file, whole or not at all."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from django.core.management.base import CommandError

from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.exports.exports import KIND, WRITERS, ExportOptions, is_rows, write_run
from rollouts.management import TerminalCommand
from rollouts.store.people.activity_log import record
from rollouts.store.runs.runs import run_and_trajectories


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run or of a trajectory")
        parser.add_argument("--format", default="own_jsonl", choices=WRITERS)
        parser.add_argument(
            "--strategy", default="", choices=["", *STRATEGIES], metavar="SLUG",
            help=f"the rows that this strategy would have made: {', '.join(STRATEGIES)}",
        )
        faulty = parser.add_mutually_exclusive_group()
        faulty.add_argument(
            "--leave-out", action="store_true",
            help="leave out trajectories with rows that break the target's invariants, or that --strategy refuses",
        )
        faulty.add_argument(
            "--force", action="store_true",
            help="write rows that break the target's invariants too, and leave out what --strategy refuses",
        )
        parser.add_argument("--pad-to", type=int, metavar="N", help="with --format sft: rows of N tokens")
        parser.add_argument("--pad-id", type=int, default=0, metavar="ID", help="fills the rows up (default: 0)")
        parser.add_argument("--output", required=True, metavar="FILE", help="- writes to the standard output")

    def handle(self, *_: Any, **options: Any) -> None:
        plan = ExportOptions(
            **{field.name: options[field.name] for field in fields(ExportOptions) if field.name in options}
        )
        target = Path(options["output"])
        if options["output"] == "-":
            self._write(sys.stdout.buffer, options["run"], plan)
            return
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                n = self._write(file, options["run"], plan)
            os.replace(draft, target)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror}.") from error
        finally:
            draft.unlink(missing_ok=True)
        what = "rows" if is_rows(options["format"]) else "trajectories"
        self.stdout.write(f"{n:,} {what} written to {target}.")

    def _write(self, file: IO[bytes], code: str, wanted: ExportOptions) -> int:
        target = run_and_trajectories(code)
        if target is None:
            raise CommandError(f"There is no run and no trajectory with the code {code!r}.")
        run, records = target
        n, left_out = write_run(run, records, wanted, file, self.stderr.write)
        record(KIND.activity, run, detail=wanted.format)
        if left_out:
            self.stderr.write(left_out)
        return n
