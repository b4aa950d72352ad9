"""Many rows at once: primary keys known before the insert, objects made and inserted without a look at each value."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections, models
from django.db.models.base import ModelState

from rollouts.store.fields import ArrayField

M = TypeVar("M", bound=models.Model)
WHOLE_FROM = 8  # Rows from which on PostgreSQL gets them by one statement: COPY takes a round trip more.


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


def bare(model: type[M], **values: Any) -> M:
    """A model object with these columns, by the names of their attributes (``run_id``), and defaults in all others. The
    constructor looks at every field of every object, which would be a third of what a trajectory costs."""
    constants, makers = _defaults(model)
    record = model.__new__(model)
    values_by_name = record.__dict__ = {"_state": ModelState(), **constants, **values}
    for name, make in makers:
        if name not in values:
            values_by_name[name] = make()
    return record


@lru_cache(maxsize=32)
def _defaults(model: type[models.Model]) -> tuple[Mapping[str, Any], Sequence[tuple[str, Callable[[], Any]]]]:
    fields = model._meta.concrete_fields
    makers = {field.attname: field.default for field in fields if field.has_default() and callable(field.default)}
    constants = {f.attname: f.get_default() for f in fields if f.attname not in makers}
    return constants, list(makers.items())


def insert_whole(objects: Sequence[models.Model]) -> None:
    """Insert objects of one model that have their keys, and values that need no preparation but those of arrays, JSON
    and times. ``bulk_create`` spends most of its time on looking each value over; that would be half of what a
    trajectory costs."""
    if not objects:
        return
    fields = objects[0]._meta.concrete_fields
    connection = connections[DEFAULT_DB_ALIAS]  # not the proxy: it is asked for each value
    prepared = [
        (n, field.to_bytes if isinstance(field, ArrayField) else partial(field.get_db_prep_save, connection=connection))
        for n, field in enumerate(fields)
        if isinstance(field, ArrayField | models.JSONField | models.DateTimeField)
    ]
    columns_of = itemgetter(*[field.attname for field in fields])
    rows = []
    for columns in map(attrgetter("__dict__"), objects):
        values = list(columns_of(columns))
        for n, prepare in prepared:
            if values[n] is not None:
                values[n] = prepare(values[n])
        rows.append(values)
    insert_values(type(objects[0]), rows)


def insert_values(model: type[models.Model], rows: Sequence[Sequence[Any]], ignore_conflicts: bool = False) -> int:
    """Insert rows, each given as what the columns hold, in their order. Returns how many were new."""
    if not rows:
        return 0
    connection = connections[DEFAULT_DB_ALIAS]
    quote = connection.ops.quote_name
    fields = model._meta.concrete_fields
    table, columns = quote(model._meta.db_table), ", ".join(quote(str(field.column)) for field in fields)
    with connection.cursor() as cursor:
        if connection.vendor != "postgresql" or len(rows) < WHOLE_FROM:
            marks = ", ".join(["%s"] * len(fields))
            ignore = " ON CONFLICT DO NOTHING" if ignore_conflicts else ""
            cursor.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks}){ignore}", rows)
            return int(cursor.rowcount)
        # A statement for each row takes the server and this process twice as long.
        types = [str(field.db_type(connection)).partition("(")[0] for field in fields]
        if ignore_conflicts:
            arrays = ", ".join(f"%s::{kind}[]" for kind in types)
            statement = f"INSERT INTO {table} ({columns}) SELECT * FROM unnest({arrays}) ON CONFLICT DO NOTHING"
            cursor.execute(statement, [list(values) for values in zip(*rows, strict=True)])
            return int(cursor.rowcount)
        statement = f"COPY {table} ({columns}) FROM STDIN (FORMAT BINARY)"
        with connection.wrap_database_errors, cursor.copy(statement) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)
        return len(rows)


def change_whole(
    model: type[models.Model], names: Sequence[str], rows: Sequence[tuple[Any, ...]], add: bool = False
) -> None:
    """Set columns of rows, each given as its values in the order of ``names`` and its primary key; ``add``: raise
    numbers by them. An ``update`` of each row by itself spends most of its time on composing the same statement
    again."""
    if not rows:
        return
    connection = connections[DEFAULT_DB_ALIAS]
    quote = connection.ops.quote_name
    meta: Any = model._meta
    fields = [meta.get_field(name) for name in names]
    prepare = [partial(field.get_db_prep_save, connection=connection) for field in fields]
    columns = [quote(field.column) for field in fields]
    sets = ", ".join(f"{column} = {column} + %s" if add else f"{column} = %s" for column in columns)
    statement = f"UPDATE {quote(meta.db_table)} SET {sets} WHERE {quote(meta.pk.column)} = %s"
    with connection.cursor() as cursor:
        cursor.executemany(
            statement, [(*(make(value) for make, value in zip(prepare, row, strict=False)), row[-1]) for row in rows]
        )
