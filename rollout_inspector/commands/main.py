"""The entry point of ``rollout-inspector``: one subcommand a module, imported when it is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rollout_inspector.commands.remedies import sentence_of
from rollout_inspector.guard.plain_text import line_of
from rollout_inspector.refusal import Refusal

SUBCOMMANDS = {
    "check": "check files of rollouts; exit status 0: passed, 1: failed, 2: could not be decided",
    "mend": "write a file again, with the trajectories that fail split, masked or left out",
    "template": "check chat templates, or compare them with a lock file; exit status as of check",
    "lock": "write a lock file: what chat templates are and do today",
    "audit": "diagnose many files side by side, and write what was found as Parquet",
    "import-audit": "show on the pages the trajectories that an audit flagged",
    "push": "send files to a server, whose pages show them",
    "watch": "push what a trainer writes to a folder, file by file, to a server",
    "mcp": "let agents ask a server, by the Model Context Protocol, on stdio or HTTP",
    "serve": "start the pages, the workers and all they need, and print the address",
    "manage": "run a command that uses the database of the pages: `manage help` lists them",
}
"""Name -> help. Its module, by default of the same name, has ``add_options(parser)`` and ``run(options) -> int``."""
MODULES = {"mcp": "agents", "import-audit": "import_audit"}
"""Subcommand -> its module, where it is called otherwise."""

PASSING_ON = ("manage", "import-audit")
"""Subcommands that give their arguments to a command of Django."""
UNDECIDED = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="rollout-inspector", description="See what a rollout sampled and what the trainer put under the gradient."
    )
    parser.add_argument("--version", action="store_true", help="print the version, and end")
    if given == ["--version"]:
        print(f"rollout-inspector {_version()}")
        return 0
    subparsers = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    for name, text in SUBCOMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if given[:1] == [name]:
            _module_of(name).add_options(sub)
    options = parser.parse_args(given)
    if options.subcommand not in PASSING_ON and "" in given:
        return refuse("An argument is empty. Is a variable of the shell not set? OPTION= says that an option is empty.")
    try:
        status: int = _module_of(options.subcommand).run(options)
        sys.stdout.flush()
    except Refusal as refusal:
        return refuse(sentence_of(refusal))
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNDECIDED
    return status


def _module_of(name: str) -> Any:
    return import_module(f"rollout_inspector.commands.{MODULES.get(name, name)}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rollout-inspector")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def refuse(sentence: str) -> int:
    """Print why a command cannot be done, and return its exit status."""
    print(line_of(sentence), file=sys.stderr)
    return UNDECIDED
