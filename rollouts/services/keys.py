"""Primary keys known before the insert, so that rows that point at each other go in with one statement a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.db import DEFAULT_DB_ALIAS, connections, models


def reserve_keys(model: type[models.Model], n: int) -> Iterator[int]:
    """``n`` unused primary keys. Call it inside the transaction that inserts them."""
    if n == 0:
        return iter(())
    table = model._meta.db_table
    connection = connections[DEFAULT_DB_ALIAS]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)", [f'"{table}"', n]
            )
            return iter([row[0] for row in cursor.fetchall()])
        # SQLite: the transaction is IMMEDIATE, so nobody else inserts before it ends; no key is ever given twice.
        cursor.execute("SELECT seq FROM sqlite_sequence WHERE name = %s", [table])
        row = cursor.fetchone()
        first = (row[0] if row else 0) + 1
    return iter(range(first, first + n))


def insert_whole(objects: Sequence[models.Model]) -> None:
    """Insert objects of one model that have their keys, and values that need no preparation but the arrays' and JSON's.

    ``bulk_create`` spends most of its time on looking each value over; that would be half of what a trajectory costs.
    """
    if not objects:
        return
    meta = objects[0]._meta
    connection = connections[DEFAULT_DB_ALIAS]  # not the proxy: it is asked for each value
    fields = meta.concrete_fields
    names = [field.attname for field in fields]
    prepared = [
        (n, field) for n, field in enumerate(fields) if isinstance(field, models.BinaryField | models.JSONField)
    ]
    rows = []
    for one in objects:
        values = [one.__dict__[name] for name in names]
        for n, field in prepared:
            values[n] = field.get_db_prep_save(values[n], connection)
        rows.append(values)
    quote = connection.ops.quote_name
    columns = ", ".join(quote(str(field.column)) for field in fields)
    marks = ", ".join(["%s"] * len(fields))
    with connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {quote(meta.db_table)} ({columns}) VALUES ({marks})", rows)
