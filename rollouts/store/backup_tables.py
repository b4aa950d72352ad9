"""Tables as files of Arrow that any database can be filled from: values of Django's fields, not of one database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import pyarrow as pa
from django.db import connection, models
from django.utils import timezone

from rollouts.store.bulk import insert_values
from rollouts.store.fields import ArrayField

MAX_BATCH_ROWS = 500
MAX_BATCH_BYTES = 8 << 20  # Of a batch: it is what restoring holds in memory at once.
MAX_PART_BYTES = 128 << 20  # Of a file. A larger table has several.


@dataclass(frozen=True)
class Column:
    """How the values of a field are written."""

    name: str  # The field's attribute, such as ``run_id``.
    type: pa.DataType
    write: Callable[[Any], Any]  # From what the field reads to what Arrow takes. None stays None.
    read: Callable[[Any], Any]  # The reverse: to what the field takes.


def columns_of(model: type[models.Model]) -> list[Column]:
    """How the values of a field are written. Raises ``TypeError`` for a kind of field that is not known."""
    return [_column(field) for field in model._meta.concrete_fields]


def write_table(model: type[models.Model], open_part: Callable[[], Any]) -> int:
    """Write every row of a model, in the order of its keys. Returns their number. ``open_part`` returns a context
    manager of a file to write to; it is called for each file. Call this in a snapshot."""
    columns = columns_of(model)
    schema = pa.schema([(column.name, column.type) for column in columns])
    batches, n_rows = _batches(model, columns, schema), 0
    batch = next(batches, None)
    while batch is not None:
        with open_part() as file, pa.ipc.new_stream(file, schema, options=_OPTIONS) as writer:
            n_bytes = 0
            while batch is not None and n_bytes < MAX_PART_BYTES:
                writer.write_batch(batch)
                n_bytes, n_rows = n_bytes + batch.nbytes, n_rows + batch.num_rows
                batch = next(batches, None)
    return n_rows


def read_rows(model: type[models.Model], file: IO[bytes]) -> Iterator[list[list[Any]]]:
    """Batches of rows, each row as the values that the fields of the model take, in their order. A column that came
    after the file was written has its default. Raises ``ValueError`` where the file was not written from such a model,
    or is damaged."""
    columns = columns_of(model)
    try:
        with pa.ipc.open_stream(file) as reader:
            written = set(reader.schema.names)
            later = [field for field in model._meta.concrete_fields if field.attname not in written]
            if written - {column.name for column in columns} or not all(field.blank or field.null for field in later):
                raise ValueError(f"It does not have the columns of {model._meta.db_table}.")
            defaults = {field.attname: field.get_default() for field in later}
            for batch in reader:
                rows = [
                    [None if value is None else column.read(value) for value in batch.column(column.name).to_pylist()]
                    if column.name in written
                    else [defaults[column.name]] * batch.num_rows
                    for column in columns
                ]
                yield [list(row) for row in zip(*rows, strict=True)]
    except pa.ArrowInvalid as error:
        raise ValueError(f"It is no file of a table: {error}") from error


def fill_table(model: type[models.Model], file: IO[bytes]) -> int:
    """Insert the rows of a file as they are, keys and times included. Returns their number."""
    fields, n_rows = model._meta.concrete_fields, 0
    for rows in read_rows(model, file):
        prepared = [
            [field.get_db_prep_save(value, connection) for field, value in zip(fields, row, strict=True)]
            for row in rows
        ]
        insert_values(model, prepared)
        n_rows += len(rows)
    return n_rows


_JSON = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


def _batches(model: type[models.Model], columns: list[Column], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    rows: list[tuple[Any, ...]] = []
    n_bytes = 0
    names = [column.name for column in columns]
    for row in model._base_manager.order_by("pk").values_list(*names).iterator(MAX_BATCH_ROWS):
        written = tuple(
            None if value is None else column.write(value) for column, value in zip(columns, row, strict=True)
        )
        rows.append(written)
        n_bytes += sum(len(value) for value in written if isinstance(value, bytes | str))
        if len(rows) >= MAX_BATCH_ROWS or n_bytes >= MAX_BATCH_BYTES:
            yield _batch(rows, schema)
            rows, n_bytes = [], 0
    if rows:
        yield _batch(rows, schema)


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(values, type) for values, type in zip(zip(*rows, strict=True), schema.types, strict=True)]
    return pa.record_batch(arrays, schema=schema)


_SIMPLE: list[tuple[tuple[type[models.Field[Any, Any]], ...], pa.DataType]] = [
    ((models.BooleanField,), pa.bool_()),
    ((models.IntegerField,), pa.int64()),  # AutoField and the sizes of integers are its subclasses
    ((models.FloatField,), pa.float64()),
    ((models.CharField, models.TextField), pa.large_string()),
    ((models.DateTimeField,), pa.timestamp("us", "UTC")),
    ((models.DateField,), pa.date32()),
    ((models.DurationField,), pa.duration("us")),
]


def _column(field: Any) -> Column:
    target = field
    while target.remote_field is not None:
        target = target.target_field
    if isinstance(target, ArrayField):
        return Column(field.attname, pa.large_binary(), target.to_bytes, bytes)
    if isinstance(target, models.BinaryField):
        return Column(field.attname, pa.large_binary(), bytes, bytes)
    if isinstance(target, models.JSONField):
        return Column(field.attname, pa.large_string(), _JSON, json.loads)
    if isinstance(target, models.UUIDField | models.GenericIPAddressField):
        return Column(field.attname, pa.large_string(), str, target.to_python)
    for kinds, type in _SIMPLE:
        if isinstance(target, kinds):
            return Column(field.attname, type, _as_it_is, _as_it_is)
    raise TypeError(
        f"Backups cannot write {type(target).__module__}.{type(target).__qualname__}: add it to "
        "rollouts.store.backup_tables."
    )


def _as_it_is(value: Any) -> Any:
    return value


ACCESS_TABLES = ("rollouts_apitoken", "rollouts_sharelink", "rollouts_invitation", "django_session")
"""The tables of what lets somebody in without a password."""


def end_access(model: Any) -> int:
    """End what lets somebody in, as the backup has it: nobody knows what was ended since. Returns how many."""
    if model._meta.db_table == "django_session":
        n: int = model.objects.count()
        model.objects.all().delete()
        return n
    open_rows = model.objects.filter(revoked_at=None)
    if any(field.name == "used_at" for field in model._meta.fields):
        open_rows = open_rows.filter(used_at=None)
    return int(open_rows.update(revoked_at=timezone.now()))
