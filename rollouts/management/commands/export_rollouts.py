"""Write the finished trajectories of a run to a file, whole or not at all."""

import sys
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from django.core.management.base import CommandError

from rollout_inspector.outputs import whole_file
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.exports.exports import KIND, WRITERS, ExportOptions, is_rows, write_run
from rollouts.management import TerminalCommand
from rollouts.management.arguments import run_and_trajectories_named
from rollouts.store.people.activity_log import record


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
        parser.add_argument(
            "--skip-discontinuous", action="store_true",
            help="leave out trajectories whose calls do not continue one another, so that they are several rows",
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
        try:
            with whole_file(target) as file:
                n = self._write(file, options["run"], plan)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror}.") from error
        what = "rows" if is_rows(options["format"]) else "trajectories"
        self.stdout.write(f"{n:,} {what} written to {target}.")

    def _write(self, file: IO[bytes], code: str, wanted: ExportOptions) -> int:
        run, records = run_and_trajectories_named(code)
        n, left_out = write_run(run, records, wanted, file, self.stderr.write)
        record(KIND.activity, run, detail=wanted.format)
        if left_out:
            self.stderr.write(left_out)
        return n
