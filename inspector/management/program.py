"""Runs a command of Django or of ours, and says in a sentence what stopped it."""

import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO, TypeGuard

from django.conf import settings
from django.core import management
from django.db.utils import OperationalError, ProgrammingError

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")


def find_packages() -> None:
    """Raises ``ModuleNotFoundError`` where the settings lack a package: Django would call every command unknown."""
    for name in {app.partition(".")[0] for app in settings.INSTALLED_APPS}:
        import_module(name)


def run_command(arguments: Sequence[str], program: str) -> None:
    """Run a command; one that fails exits itself. ``program``: what the caller wrote before the command."""
    try:
        try:
            management.execute_from_command_line([program, *arguments])
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
        if not (sentence := sentence_of(error, program)):
            raise
        sys.exit(sentence)


def nobody_reads(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Whether a stream is a pipe whose reader has gone, as `| head` does."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def sentence_of(error: Exception, program: str) -> str:
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
    migrate = f"{program if program == 'manage.py' else 'rollout-inspector manage'} migrate"
    return (
        f"The database lacks tables or columns of this version ({str(error).splitlines()[0]}). "
        f"Run `{migrate}` and try again."
    )
