"""The entry point of ``rollout-inspector``: finds a command, reads its module and runs it."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout_inspector.commands.remedies import sentence_of
from rollout_inspector.outputs import PlainStream, line_of
from rollout_inspector.refusal import Refusal

ROOT = Path(__file__).parents[2]
FILES = ("open", "check", "mend", "template", "lock", "audit", "gauntlet")
REMOTE = ("push", "watch", "mcp")
UNDECIDED = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Command:
    """A command is a module of its name, and the first line of the module says what it does.

    One without a server has ``add_options(parser)`` and ``run(options)``, which returns the exit status. One that needs
    a server is a command of Django, and ``manage.py NAME`` is the same.
    """

    name: str
    file: Path
    needs_server: bool = False

    @property
    def help(self) -> str:
        """The first line of the module, which is not imported for it."""
        with self.file.open(encoding="utf-8") as lines:
            return lines.readline().strip().strip('"')

    def run(self, arguments: Sequence[str]) -> int:
        """Read the module and run the command; returns its exit status."""
        if self.needs_server:
            return run_on_server([self.name, *arguments], "rollout-inspector")
        with redirect_stdout(PlainStream(sys.stdout)), redirect_stderr(PlainStream(sys.stderr)):
            options = self.parser().parse_args(arguments)
            if "" in arguments:
                return refuse(
                    "An argument is empty. Is a variable of the shell not set? OPTION= says that an option is empty."
                )
            status: int = self._module().run(options)
            return status

    def parser(self) -> argparse.ArgumentParser:
        """What reads the options of a command without a server; Django has those of the others."""
        module = self._module()
        parser = argparse.ArgumentParser(prog=f"rollout-inspector {self.name}", description=module.__doc__)
        module.add_options(parser)
        return parser

    def _module(self) -> Any:
        return import_module(f"{__package__}.{self.name}")


def groups() -> dict[str, list[Command]]:
    """Every command below the title of its group; commands that need a server are found by their files."""
    here = Path(__file__).parent

    def of_server(house: str) -> list[Command]:
        files = (ROOT / house / "management" / "commands").glob("[!_]*.py")
        return [Command(file.stem, file, needs_server=True) for file in sorted(files)]

    return {
        "Files, without a server": [Command(name, here / f"{name}.py") for name in FILES],
        "A server, from any machine": [Command(name, here / f"{name}.py") for name in REMOTE],
        "Runs and trajectories, on the machine of the server": of_server("rollouts"),
        "The server": of_server("inspector"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. A name may be written with `-` for `_`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"rollout-inspector {installed_version()}")
        return 0
    name = arguments[0].replace("-", "_") if arguments else ""
    commands = {command.name: command for group in groups().values() for command in group}
    if name != "manage" and name not in commands:
        _no_command(arguments)
    try:
        status = run_on_server(arguments[1:]) if name == "manage" else commands[name].run(arguments[1:])
        sys.stdout.flush()
    except Refusal as refusal:
        return refuse(sentence_of(refusal))
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        return refuse("This needs the package pyarrow, which is not installed. Install it: pip install pyarrow")
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNDECIDED
    return status


def _no_command(arguments: list[str]) -> None:
    """Print the help if it is asked for, or that there is no such command; raises ``SystemExit``."""
    lines = []
    for title, commands in groups().items():
        lines += [f"{title}:", *(f"    {command.name:18} {command.help}" for command in commands), ""]
    lines.append("`manage COMMAND` runs a command of Django, such as migrate; `manage help` lists them.")
    parser = argparse.ArgumentParser(
        prog="rollout-inspector", description="See what a rollout sampled and what the trainer put under the gradient.",
        epilog="\n".join(lines), formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version, and end")
    parser.add_argument("command", metavar="COMMAND ...", help="one of those below; `COMMAND --help` lists its options")
    parser.error(f"there is no command {parser.parse_known_args(arguments)[0].command!r}; --help lists them")


def run_on_server(arguments: Sequence[str], program: str = "rollout-inspector manage") -> int:
    """Run a command of Django or of the server; returns 2 where a package lacks. A command that fails exits itself.

    ``program``: what the caller wrote before the command. Nothing else here knows of the server's packages.
    """
    sys.path.insert(0, str(ROOT))  # the project of a user may have packages of the names `rollouts` and `inspector`
    try:
        django_program = import_module("inspector.management.program")
        django_program.find_packages()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("rollouts", "inspector"):
            raise
        is_checkout = (ROOT / "manage.py").is_file()
        way_out = (
            "Run `make run` once, which creates .venv, and then call `.venv/bin/python manage.py ...`."
            if is_checkout
            else "Install the packages of the server: pip install 'rollout-inspector[server]'"
        )
        return refuse(f"This command needs the package {error.name}, which is not installed. {way_out}")
    django_program.run_command(arguments, program)
    return 0


def installed_version() -> str:
    """The version of the installed package, or that there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rollout-inspector")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def refuse(sentence: str) -> int:
    """Print why a command cannot be done, and return its exit status."""
    print(line_of(sentence), file=sys.stderr)
    return UNDECIDED
