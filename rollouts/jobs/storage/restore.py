"""Fills an empty database, of any kind, and a file storage from a backup. The backup may be of an older version."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from django.contrib.auth import get_user_model
from django.core.files.storage import Storage
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder

from rollout_inspector.outputs import draft_file
from rollout_inspector.refusal import Refusal, Remedy
from rollouts.jobs.storage.backup import Manifest, Part, read_manifest
from rollouts.store import files, storage_mark
from rollouts.store.backup_tables import ACCESS_TABLES, end_access, fill_table
from rollouts.store.database import OLD_MIGRATIONS, database_identity, has_rows
from rollouts.store.models import Run, TemplateCheck, Tokenizer


def restore(
    source: Storage, tell: Callable[[str], object], adopts: bool = False, keeps_access: bool = False
) -> Manifest:
    """Restore a backup. The database is filled in one transaction, after the files.

    ``adopts``: the file storage may belong to another database, which is no longer used. ``keeps_access``: API keys,
    share links, invitations and sessions work again, also those that somebody ended since the backup. Raises
    :class:`Refusal` with a sentence where something is not empty, not whole, of another database or not of a version
    that is known.
    """
    manifest = read_manifest(source)
    executor, targets = _migrations_to_begin_with(manifest)
    _refuse_what_is_held(manifest)
    owner = storage_mark.marked()
    identity = database_identity() if MigrationRecorder(connection).has_table() else ""  # no tables yet
    if owner and not adopts and owner != identity:
        raise Refusal(
            f"The files of INSPECTOR_FILES belong to another database ({owner[:20]}). Name an empty place.",
            Remedy.ADOPT_FILES,
        )
    for part in manifest.files:
        with _checked(source, f"files/{part.name}", part) as file:
            files.put(part.name, Path(file.name))
    tell(f"{len(manifest.files):,} files are restored.")
    executor.migrate(targets)
    old = MigrationExecutor(connection).loader.project_state(targets).apps
    models = {model._meta.db_table: model for model in old.get_models(include_auto_created=True)}
    tables = {*manifest.tables, *(table for table, n in manifest.rows.items() if n)}
    if missing := sorted(tables - models.keys()):
        raise Refusal(f"This version knows no table {missing[0]}. Use the version that made the backup.")
    with connection.constraint_checks_disabled(), transaction.atomic():
        for table in models:  # migrations may have made rows of their own
            with connection.cursor() as cursor:
                cursor.execute(f"DELETE FROM {connection.ops.quote_name(table)}")
        for table, parts in manifest.tables.items():
            n_rows = sum(_restore_part(source, part, models[table]) for part in parts)
            if n_rows != manifest.rows.get(table, 0):
                raise Refusal(f"{table} has {n_rows} rows in the backup, not {manifest.rows.get(table, 0)}.")
        if not keeps_access:
            n_ended = sum(end_access(models[table]) for table in ACCESS_TABLES if table in models)
            tell(f"{n_ended:,} API keys, share links, invitations and sessions are ended.")
        connection.check_constraints()
        with connection.cursor() as cursor:
            for statement in connection.ops.sequence_reset_sql(no_style(), list(models.values())):
                cursor.execute(statement)
    tell(f"{sum(manifest.rows.values()):,} rows of {len(manifest.rows)} tables are restored.")
    call_command("migrate", interactive=False, verbosity=0)  # to this version
    if owner:
        storage_mark.adopt()
    return manifest


def _migrations_to_begin_with(manifest: Manifest) -> tuple[MigrationExecutor, list[tuple[str, str]]]:
    """What brings the database to the version of the backup."""
    executor = MigrationExecutor(connection)
    had = {(app, name) for app, name in manifest.migrations}
    if ("rollouts", OLD_MIGRATIONS[1]) in had:  # the tables that one migration makes today
        had = {node for node in had if node[0] != "rollouts"} | {("rollouts", "0001_initial")}
    graph = executor.loader.graph
    if unknown := sorted(f"{app}.{name}" for app, name in had if (app, name) not in graph.nodes):
        raise Refusal(
            f"The backup is of another version: this one knows no migration {unknown[0]}. Use the version that made it."
        )
    if ahead := sorted(f"{app}.{name}" for app, name in set(executor.loader.applied_migrations) - had):
        raise Refusal(f"The database is newer than the backup ({ahead[0]}). Name a database without tables.")
    targets = [node for node in sorted(had) if not any(child.key in had for child in graph.node_map[node].children)]
    return executor, targets


def _refuse_what_is_held(manifest: Manifest) -> None:
    for model in (get_user_model(), Run, Tokenizer, TemplateCheck):
        if has_rows(model):
            what = model._meta.verbose_name_plural
            raise Refusal(f"The database is not empty: it has {what}. Name an empty one in DATABASE_URL.")
    sizes = {part.name: part.size for part in manifest.files}
    for stored in files.listed(""):
        if sizes.get(stored.key, stored.size) != stored.size:
            raise Refusal(f"The file storage has another {stored.key}. Name an empty place in INSPECTOR_FILES.")


def _restore_part(source: Storage, part: Part, model: Any) -> int:
    with _checked(source, part.name, part) as file:
        try:
            return fill_table(model, file)
        except ValueError as error:
            raise Refusal(f"{part.name} cannot be restored. {error}") from error


@contextmanager
def _checked(source: Storage, name: str, part: Part) -> Iterator[IO[bytes]]:
    """A copy of a file of the backup on this machine, compared with its digest."""
    backend: Any = source
    try:
        files.checked(name)  # before it is read: the storage would not refuse each name in words of ours
    except ValueError as error:
        raise Refusal(f"The backup names a file that no storage takes. {error}") from error
    digest = hashlib.sha256()
    with draft_file(files.scratch_folder(), "restore") as copy:
        try:
            with backend.reader(name) as file:
                while data := file.read(1 << 20):
                    digest.update(data)
                    copy.write(data)
        except FileNotFoundError:
            raise Refusal(f"The backup lacks {name}, which its manifest names. Use another backup.") from None
        if digest.hexdigest() != part.sha256:
            raise Refusal(
                f"{name} of the backup is damaged: its SHA-256 is not that of the manifest. Use another backup."
            )
        copy.flush()
        copy.seek(0)
        yield copy
