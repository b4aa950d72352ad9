"""Write the trajectories of a run to a file."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import IO, Any

from django.core.management.base import BaseCommand, CommandError

from rollouts.exporting import WRITERS, is_rows, write_run
from rollouts.formats.exports import EXPORTS, ExportRefused, padded
from rollouts.models import Run, Trajectory
from rollouts.tito.strategies import STRATEGIES


class Command(BaseCommand):
    help = "Write the finished trajectories of a run to a file, whole or not at all."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run or of a trajectory")
        parser.add_argument("--format", default="own_jsonl", choices=WRITERS)
        parser.add_argument(
            "--strategy", default="", choices=["", *STRATEGIES], metavar="SLUG",
            help=f"the rows that this strategy would have made: {', '.join(STRATEGIES)}",
        )  # fmt: skip
        parser.add_argument(
            "--force", action="store_true",
            help="write rows that break the target's invariants too, and leave out what --strategy refuses",
        )  # fmt: skip
        parser.add_argument("--pad-to", type=int, metavar="N", help="with --format sft: rows of N tokens")
        parser.add_argument("--pad-id", type=int, default=0, metavar="ID", help="what fills them up (default: 0)")
        parser.add_argument("--output", required=True, metavar="FILE", help="- writes to the standard output")

    def handle(self, *_: Any, **options: Any) -> None:
        if options["pad_to"] is not None and (options["format"] != "sft" or options["pad_to"] < 1):
            raise CommandError("--pad-to takes a number of tokens from 1 on, and goes with --format sft.")
        target = Path(options["output"])
        if options["output"] == "-":
            try:
                self._write(sys.stdout.buffer, options)
            except ExportRefused as refusal:
                raise CommandError(str(refusal)) from refusal
            return
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("wb") as file:
                n = self._write(file, options)
            os.replace(draft, target)
        except ExportRefused as refusal:
            raise CommandError(str(refusal)) from refusal
        except OSError as error:
            raise CommandError(f"{target} cannot be written: {error.strerror}.") from error
        finally:
            draft.unlink(missing_ok=True)
        what = "rows" if is_rows(options["format"]) else "trajectories"
        self.stdout.write(f"{n:,} {what} written to {target}.")

    def _write(self, file: IO[bytes], options: dict[str, Any]) -> int:
        run, wanted = _find(options["run"])
        target = None
        if options["pad_to"] is not None:
            target = padded(EXPORTS["sft"], options["pad_to"], options["pad_id"])
        return write_run(
            run, wanted, options["format"], file,
            force=options["force"], strategy=options["strategy"], target=target, tell=self.stderr.write,
        )  # fmt: skip


def _find(code: str) -> tuple[Run, Any]:
    runs = Run.objects.select_related("tokenizer__chat_template", "chat_template")
    run = runs.filter(code=code).first()
    if run is not None:
        return run, run.trajectories.all()
    one = Trajectory.objects.filter(code=code)
    record = one.first()
    if record is None:
        raise CommandError(f"There is no run and no trajectory with the code {code!r}.")
    return runs.get(pk=record.run_id), one
