"""``rollout-inspector manage COMMAND ...`` and ``manage.py COMMAND ...``: the commands that use the database."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO, TypeGuard

from rollout_inspector.commands.main import refuse

_IS_CHECKOUT = (Path(__file__).parents[2] / "manage.py").is_file()
PROGRAM = "manage.py" if _IS_CHECKOUT else "rollout-inspector manage"
_WAY_OUT = (
    "Run `make run` once, which creates .venv, and then call `.venv/bin/python manage.py ...`."
    if _IS_CHECKOUT
    else "Install the packages of the server: pip install 'rollout-inspector[server]'"
)


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("command", help="a command; `help` lists them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: Namespace) -> int:
    """Run the command."""
    return run_command([options.command, *options.arguments])


def run_command(arguments: Sequence[str]) -> int:
    """Run one of Django's or our commands; returns 0, or 2 where a package lacks. A command that fails exits itself."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
    try:
        from django.conf import settings
        from django.core.management import execute_from_command_line
        from django.db.utils import OperationalError, ProgrammingError

        # Django would call every command unknown where the settings lack a package.
        for name in {app.partition(".")[0] for app in settings.INSTALLED_APPS}:
            import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("rollouts", "inspector"):
            raise
        return refuse(f"This command needs the package {error.name}, which is not installed. {_WAY_OUT}")
    try:
        try:
            execute_from_command_line([PROGRAM, *arguments])
        finally:
            if sys.stdout is not None:  # None where the caller closed it
                sys.stdout.flush()
    except BrokenPipeError:
        cut = [stream for stream in (sys.stdout, sys.stderr) if nobody_reads(stream)]
        if not cut:
            raise
        for stream in cut:  # what is left in its buffer must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.unraisablehook = lambda _: None  # an iterator over a closed database cannot be closed again
        sys.exit(128 + signal.SIGPIPE)
    except (OperationalError, ProgrammingError) as error:
        if not (sentence := sentence_of(error)):
            raise
        sys.exit(sentence)
    return 0


def nobody_reads(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Whether a stream is a pipe whose reader has gone, as `| head` does."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def sentence_of(error: Exception) -> str:
    """What to do where the database is not of this version; empty where it is, or cannot even be asked."""
    from django.db import DatabaseError, connection
    from django.db.migrations.executor import MigrationExecutor

    from rollouts.store.database import refusal_of_old_database

    try:
        connection.rollback()  # what failed may have left a transaction open
        if sentence := refusal_of_old_database():
            return sentence
        executor = MigrationExecutor(connection)
        if not executor.migration_plan(executor.loader.graph.leaf_nodes()):
            return ""
    except DatabaseError:
        return ""
    return (
        f"The database lacks tables or columns of this version ({str(error).splitlines()[0]}). "
        f"Run `{PROGRAM} migrate` and try again."
    )
