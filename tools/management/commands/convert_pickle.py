"""Convert a pickle of slime, miles or SkyRL, which you trust, into a file to import.

It is a slime or miles debug dump of rollouts or of training data (torch.save, .pt), or a SkyRL training input (.pkl);
what is written is this project's own JSONL.

A pickle is a program: opening one runs what it says. So the server never opens one, and you run this command
yourself, on the machine that wrote the file, and only on files that you trust. There are two more lines of defence. A
process opens it that may only compute: no file, no socket, no other program, with limits of memory and time. And only
the classes that arrays and tensors are made of are looked up: every other class becomes a plain record without
behaviour, and an archive that can hold a program is refused.
"""

import json
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from django.core.management.base import CommandError

from rollout_inspector.outputs import whole_file
from rollout_inspector.text.processes import Late, LimitedProcess, ProcessEnded
from rollouts.management import TerminalCommand

SECONDS = 600.0
"""How long the process may take for the next million bytes."""
_CHILD = Path(__file__).resolve().parents[2] / "pickles" / "confined.py"
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class Command(TerminalCommand):
    requires_system_checks: list[str] = []

    def create_parser(self, prog_name: str, subcommand: str, **more: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **more)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("input", metavar="IN", help="a .pt or .pkl file that you trust")
        parser.add_argument("output", metavar="OUT", help="a .jsonl file to import")

    def handle(self, *_: Any, **options: Any) -> None:
        source, target = Path(options["input"]).absolute(), Path(options["output"])
        try:
            if not S_ISREG(source.stat().st_mode):
                raise CommandError(f"{source} is no file.")
            with whole_file(target) as file:
                n = self._convert(source, file)
        except OSError as error:
            raise CommandError(f"{error.filename or source} cannot be opened: {error.strerror or error}.") from error
        self.stdout.write(f"{n:,} trajectories written to {target}.")

    def _convert(self, source: Path, file: IO[bytes]) -> int:
        """Write the trajectories of a pickle, which a confined process opens. Returns how many."""
        child = LimitedProcess(f"The conversion of {source}", [str(_CHILD), str(source)], _ENVIRONMENT)
        try:
            while (frame := child.receive(time.monotonic() + SECONDS)).startswith(b"L"):
                file.write(frame[1:])
            result = json.loads(frame[1:])
        except Late:
            raise CommandError(f"{source} took longer to open than a conversion may.") from None
        except ProcessEnded as error:
            raise CommandError(str(error)) from error
        finally:
            child.close()
        if sentence := result.get("refusal"):
            raise CommandError(f"{source}: {sentence}")
        return int(result["n"])
