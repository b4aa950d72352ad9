"""Convert a pickle of slime, miles or SkyRL, which you trust, into a file to import.

It is a slime or miles debug dump of rollouts or of training data (torch.save, .pt), or a SkyRL training input (.pkl);
what is written is this project's own JSONL.

A pickle is a program: opening one runs what it says. So the server never opens one, and you run this command
yourself, on the machine that wrote the file, and only on files that you trust. As a second line of defence, only the
classes that arrays and tensors are made of are looked up; every other class becomes a plain record without behaviour.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.formats.readers import inspector_jsonl
from rollout_inspector.refusal import Refusal
from rollouts.management import TerminalCommand
from tools.pickles.trainer_dumps import trajectories
from tools.pickles.unpickling import load


class Command(TerminalCommand):
    requires_system_checks: list[str] = []

    def create_parser(self, prog_name: str, subcommand: str, **more: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **more)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("input", metavar="IN", help="a .pt or .pkl file that you trust")
        parser.add_argument("output", metavar="OUT", help="a .jsonl file to import")

    def handle(self, *_: Any, **options: Any) -> None:
        source, target = Path(options["input"]), Path(options["output"])
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            records = trajectories(load(source), source.stem)
            with draft.open("wb") as file:
                n = inspector_jsonl.write(records, file)
            if not n:
                raise Refusal(f"{source} holds no samples.")
            os.replace(draft, target)
        except Refusal as error:
            raise CommandError(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {str(error)[:300]}"
            raise CommandError(f"{source} holds arrays or numbers of an unknown shape ({what}).") from error
        except OSError as error:
            raise CommandError(f"{error.filename or source} cannot be opened: {error.strerror or error}.") from error
        finally:
            draft.unlink(missing_ok=True)
        self.stdout.write(f"{n:,} trajectories written to {target}.")
