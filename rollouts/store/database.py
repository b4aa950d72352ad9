"""The database itself: which one it is, and its clock."""

from __future__ import annotations

import hashlib
import time

from django.db import DatabaseError, connection, transaction


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
