#!/usr/bin/env python
"""Run one of Rollout Inspector's commands: `python manage.py help` lists them."""

import os
import select
import signal
import sys
from typing import TextIO, TypeGuard


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as error:
        sys.exit(
            f"Django cannot be imported ({error}). Run `make run` once, which creates .venv, "
            "and then call `.venv/bin/python manage.py ...`."
        )
    from django.db.utils import OperationalError, ProgrammingError

    try:
        try:
            execute_from_command_line(sys.argv)
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
        if not migrations_are_missing():
            raise
        sys.exit(
            f"The database lacks tables or columns of this version ({str(error).splitlines()[0]}). "
            "Run `manage.py migrate` and try again."
        )


def nobody_reads(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Whether a stream is a pipe whose reader has gone, as `| head` does."""
    if stream is None:
        return False
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def migrations_are_missing() -> bool:
    """Whether the database is behind the migrations; False when it cannot even be asked."""
    from django.db import DatabaseError, connection
    from django.db.migrations.executor import MigrationExecutor

    try:
        connection.rollback()  # what failed may have left a transaction open
        executor = MigrationExecutor(connection)
        return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))
    except DatabaseError:
        return False


if __name__ == "__main__":
    main()
