"""A backup while the server runs: the database as one snapshot saw it, then the files that it names. A file never
changes under its key, so files may be copied after the snapshot. Where some that it names are deleted in between, the
database is read again. ``manifest.json`` is written last and holds the size and SHA-256 of everything."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import IO, Any

import msgspec
from django.apps import apps
from django.core.files.storage import Storage
from django.db import connection, transaction
from django.db.migrations.recorder import MigrationRecorder

from rollout_inspector.outputs import draft_file
from rollout_inspector.refusal import Refusal
from rollouts.store import files
from rollouts.store.backup_tables import write_table
from rollouts.store.files.values import PutFile
from rollouts.store.token_arrays.stores import SEGMENTS
from rollouts.store.trajectories.token_segments import segment_keys

MANIFEST = "manifest.json"
FORMAT = 1
ATTEMPTS = 3  # How often the database is read while files that it may name are being deleted.
OF_THIS_PLACE = "machines/"
"""Below it lies what belongs to one storage: the mark by which machines know that they share it."""


@dataclass(frozen=True)
class Part:
    """A file of a backup."""

    name: str
    size: int  # Bytes.
    sha256: str


@dataclass
class Manifest:
    """What a backup holds."""

    format: int = FORMAT
    made_at: str = ""  # When the snapshot of the database was taken.
    database: str = ""  # The kind of database that it was made from.
    migrations: list[tuple[str, str]] = field(default_factory=list)
    """(app, name) of every migration that the database had."""
    rows: dict[str, int] = field(default_factory=dict)  # Table -> rows.
    tables: dict[str, list[Part]] = field(default_factory=dict)  # Table -> its parts, in order.
    files: list[Part] = field(default_factory=list)  # Files of the file storage; ``name`` is the key.
    gone: list[str] = field(default_factory=list)
    """Keys that were deleted while the backup was made, and may be named by the database."""


def back_up(target: Storage, tell: Callable[[str], object]) -> Manifest:
    """Write a backup into an empty storage. Raises :class:`Refusal`, or what the storages raise."""
    backend: Any = target
    if next(iter(backend.stored("")), None) is not None:
        raise Refusal("There are files already. Name a new folder or an empty prefix for each backup.")
    copied: dict[str, Part] = {}
    for attempt in range(1, ATTEMPTS + 1):
        before = {stored.key for stored in files.listed("")}
        manifest, segments = _save_tables(target, f"tables-{attempt}")
        tell(f"{sum(manifest.rows.values()):,} rows of {len(manifest.rows)} tables are saved.")
        stored_keys = before | {stored.key for stored in files.listed("")}
        keys = sorted(key for key in stored_keys if not key.startswith(OF_THIS_PLACE))
        for key in keys:
            if key not in copied and (part := _copy_file(key, target)) is not None:
                copied[key] = part
        # Segments that nothing names go at any time, and others may have come and gone between two lists of files.
        lost = {key for key in keys if not key.startswith(SEGMENTS)} | segments
        manifest.gone = sorted(lost - copied.keys())
        if not manifest.gone:
            break
        tell(f"{len(manifest.gone)} files were deleted meanwhile.")
    manifest.files = [copied[key] for key in sorted(copied)]
    for old in range(1, attempt):
        backend.delete_all(f"tables-{old}/")
    _put(target, MANIFEST, lambda file: file.write(json.dumps(asdict(manifest), indent=1).encode()))
    tell(f"{len(manifest.files):,} files are saved, {sum(part.size for part in manifest.files):,} bytes.")
    return manifest


def read_manifest(source: Storage) -> Manifest:
    """Raises :class:`Refusal` where there is no whole backup, or one of another format."""
    backend: Any = source
    if not source.exists(MANIFEST):
        raise Refusal(f"There is no {MANIFEST}, so this is no backup, or one that broke off. Name another.")
    with backend.reader(MANIFEST) as file:
        raw = file.read()
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal(f"{MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise Refusal(f"The backup has the format {manifest.format}; this version reads {FORMAT}.")
    return manifest


@contextmanager
def snapshot() -> Iterator[None]:
    """Reads see the database as it is now, whatever others write meanwhile. Nobody waits for it."""
    if connection.vendor == "postgresql":
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield
        return
    with connection.cursor() as cursor:
        cursor.execute("BEGIN DEFERRED")  # ours are IMMEDIATE, and would keep writers out
        try:
            cursor.execute("SELECT COUNT(*) FROM sqlite_master")  # the snapshot begins with the first read
            yield
        finally:
            cursor.execute("ROLLBACK")


def saved_models() -> list[Any]:
    """Every model with a table, tables between two models included."""
    models = apps.get_models(include_auto_created=True)
    return sorted(
        (model for model in models if model._meta.managed and not model._meta.proxy), key=lambda m: m._meta.db_table
    )


def _save_tables(target: Storage, folder: str) -> tuple[Manifest, set[str]]:
    """Returns also the keys of the segments that the snapshot reads."""
    manifest = Manifest(database=connection.vendor)
    with snapshot():
        segments = segment_keys()
        manifest.made_at = datetime.now(UTC).isoformat(timespec="seconds")
        manifest.migrations = sorted(MigrationRecorder(connection).applied_migrations())
        for model in saved_models():
            table = model._meta.db_table
            parts: list[Part] = []

            @contextmanager
            def open_part(table: str = table, parts: list[Part] = parts) -> Iterator[IO[bytes]]:
                with draft_file(files.scratch_folder(), "backup") as file:
                    yield file
                    parts.append(_put_draft(target, f"{folder}/{table}/{len(parts):05}.arrow", file))

            manifest.rows[table] = write_table(model, open_part)
            manifest.tables[table] = parts
    return manifest, segments


def _copy_file(key: str, target: Storage) -> Part | None:
    """Copy a file of the file storage; None when it has gone."""
    try:
        with files.open_file(key) as source:
            part = _put(target, f"files/{key}", partial(shutil.copyfileobj, source))
    except FileNotFoundError:
        return None
    return Part(key, part.size, part.sha256)


def _put(target: Storage, name: str, write: Callable[[IO[bytes]], object]) -> Part:
    with draft_file(files.scratch_folder(), "backup") as file:
        write(file)
        return _put_draft(target, name, file)


def _put_draft(target: Storage, name: str, file: IO[bytes]) -> Part:
    file.flush()
    size = file.tell()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    content = PutFile(file)
    content.path = file.name
    target.save(name, content)
    return Part(name, size, digest)
