"""The database itself: which one it is, and its clock."""

import hashlib
import time

from django.db import DatabaseError, connection, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.models import Model

OLD_MIGRATIONS = ("0002_api_token", "0041_pushed_figures")
"""The first and the last of the migrations whose place ``0001_initial`` took. No later one may have such a name."""


def refusal_of_old_database() -> str:
    """A sentence where migrations of before the first release made the database; empty = they did not."""
    if ("rollouts", OLD_MIGRATIONS[0]) not in MigrationRecorder(connection).applied_migrations():
        return ""
    return (
        "An older version of this program made the database. Make a backup with that version (`backup PLACE`), and "
        "restore it with this one into an empty database (`restore PLACE`)."
    )


def database_identity() -> str:
    """Twelve letters that are the same for all who use this database, however they name it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT MIN(applied) FROM django_migrations")
        marks = [str(cursor.fetchone()[0])]
        if connection.vendor == "postgresql":
            cursor.execute("SELECT oid FROM pg_database WHERE datname = current_database()")
            marks.append(str(cursor.fetchone()[0]))
            try:
                with transaction.atomic():
                    cursor.execute("SELECT system_identifier FROM pg_control_system()")
                    marks.append(str(cursor.fetchone()[0]))
            except DatabaseError:  # not every server lets everybody ask
                pass
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()[:12]


def clock_offset() -> float | None:
    """Seconds by which this machine's clock is ahead of the database's; None where both are the same clock."""
    if connection.vendor != "postgresql":
        return None
    before = time.time()
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())")
        there = float(cursor.fetchone()[0])
    return (before + time.time()) / 2 - there


def reload(record: Model) -> None:
    """Read the columns of a record again."""
    record.refresh_from_db()


def has_rows(model: type[Model]) -> bool:
    """Whether the table of a model exists and holds a row."""
    exists = model._meta.db_table in connection.introspection.table_names()
    return exists and bool(model._base_manager.exists())


def save_columns(record: Model, *columns: str) -> None:
    """Write these columns of a stored record."""
    record.save(update_fields=columns)
