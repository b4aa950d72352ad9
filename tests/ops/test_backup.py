"""Backups: taken while an import runs, restored into databases of both kinds, compared row by row, array by array."""

import io
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.contrib.auth import get_user_model
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.core.files.storage import storages
from django.core.management import CommandError, call_command
from django.db import connection, connections, models
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from inspector.server.file_storage import backup_place
from rollout_inspector.formats.readers import inspector_jsonl
from rollouts.jobs.storage import backup, restore
from rollouts.jobs.storage.token_moves import move_run
from rollouts.store import files, storage_mark
from rollouts.store.backup_tables import columns_of
from rollouts.store.fields import ArrayField
from rollouts.store.models import (
    ApiToken, AuditEvent, Fork, Invitation, Job, LoginSession, Replay, ReplayRows, Retokenized, Role, RowScores, Run,
    ScoredColumn, ShareLink, StepTokens, StoredTrajectory, TrajectoryDamage
)
from rollouts.store.people.accounts import local_user
from rollouts.store.people.members import invite
from rollouts.store.people.shares import create_api_key, create_share
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.token_arrays.stores import SegmentTokens
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.token_encoding import encode_trajectories
from tests.conftest import ROOT, database_url, wait_until
from tests.storage.build import chain
from tests.web.trajectory_samples import Maker, own_row

pytestmark = pytest.mark.django_db(transaction=True)

N_TRAJECTORIES = 600
IMPORTER = """
import sys, time
from pathlib import Path
import django
django.setup()
from django.core.management import call_command
from rollouts.jobs.imports import imports
file, is_saved, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
real = imports.diagnosis_for
def diagnose(value, run):
    while value.external_id == last and not is_saved.exists():
        time.sleep(0.02)
    return real(value, run)
imports.diagnosis_for, imports.BATCH_TRAJECTORIES = diagnose, 50
call_command("import_rollouts", file)
"""
"""An import that does not end before a backup has been made."""
OLDER = ("auth", "0011_update_proxy_permissions")
"""A schema of before the newest migration: a first name had at most 30 letters."""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, settings: Any) -> Path:
    """An empty file storage of the source."""
    options = {
        "BACKEND": "rollouts.store.files.folder.FolderStorage",
        "OPTIONS": {"location": str(tmp_path / "source")},
    }
    settings.STORAGES = {**settings.STORAGES, "default": options}
    return tmp_path


@pytest.fixture
def filled(tiny_tokenizer: Path) -> Run:
    """A database with rows in every table of rollouts, and files."""
    make = Maker(tiny_tokenizer)
    broken, found = make.broken("a")
    run = make.run([broken, own_row(40, advantages=np.linspace(-1, 1, 40, dtype=np.float32))], [found, []])
    fork = make.run([chain("hostile", turns=4, broken_at=2)])
    create_api_key(local_user(), "a trainer")
    trajectory = run.trajectories.order_by("index").first()
    replay = Replay.objects.create(trajectory=trajectory, key="k", report={"strategies": [{"é": None, "n": 1.5e-7}]})
    mask = np.arange(13) % 3 == 0
    ReplayRows.objects.create(replay=replay, strategy="s", lengths=[13], ids=np.arange(13), loss_mask=mask)
    Retokenized.objects.create(
        trajectory=trajectory, files_sha256="a" * 64, streams=[0, -1, -5, 1], drifts=[1, 3, 1, 0], expected_ids=[7]
    )
    column = ScoredColumn.objects.create(run=run, model="m", engine="e", gap={"n": 1})
    RowScores.objects.create(column=column, trajectory=trajectory, rows=[3, -5], values=[np.nan, -0.25, -1e-7])
    norms = np.array([0.5, np.nan, 0.0], np.float32)
    TrajectoryDamage.objects.create(trajectory=trajectory, model="m", cosine=0.5, rows=[3, 7], norms=norms)
    Fork.objects.create(run=fork, parent=trajectory, row=0, offset=3, n_shared=3, tail_ids=[7], prompt_length=2)
    Job.objects.create(run=run, kind="export", status=Job.Status.DONE, report=None)
    files.put("exports/abc/run.jsonl", io.BytesIO(b'{"a": 1}\n' * 1000))
    files.put("machines/identity", io.BytesIO(b"of this storage"))
    return run


@pytest.fixture
def other_databases() -> Iterator[Callable[[], tuple[str, str]]]:
    """`new()` returns (alias, DATABASE_URL) of an empty database: SQLite first, then one of the kind of the test."""
    made: list[tuple[str, Any]] = []

    def new() -> tuple[str, str]:
        alias = f"other_{len(made)}"
        settings_dict = dict(connections["default"].settings_dict)
        if connection.vendor == "postgresql" and made:
            name = f"test_other_{uuid.uuid4().hex[:12]}"
            with connection.cursor() as cursor:
                cursor.execute(f'CREATE DATABASE "{name}"')
            connections.databases[alias] = {**settings_dict, "NAME": name}
            made.append((alias, name))
            url = database_url().rpartition("/")[0] + f"/{name}"
        else:
            path = Path(files.default_storage.folder).parent / f"{alias}.sqlite3"
            sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path), "OPTIONS": {}}
            connections.databases[alias] = {**settings_dict, **sqlite}
            made.append((alias, None))
            url = f"sqlite:///{path}"
        connections[alias].connect()  # a test may use what is connected
        return alias, url

    yield new
    for alias, name in made:
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]
        if name:
            with connection.cursor() as cursor:
                cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def manage(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command on another machine: a data folder, a database and a file storage of its own."""
    return subprocess.run(
        [sys.executable, "manage.py", *command], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "inspector.settings", **environment},
    )


def rows(model: type[models.Model], alias: str, **chosen: Any) -> dict[Any, list[Any]]:
    """Key -> what every column holds, arrays as their type and bytes."""
    names = [column.name for column in columns_of(model)]
    found = {}
    for row in model._base_manager.using(alias).filter(**chosen).values_list("pk", *names):
        found[row[0]] = [(v.dtype.str, v.tobytes()) if isinstance(v, np.ndarray) else v for v in row[1:]]
    return found


def test_every_row_every_array_and_every_file_arrives(
    filled: Run, places: Path, bucket: str, other_databases: Callable[[], tuple[str, str]]
) -> None:
    """From the database of the test to SQLite by a folder, and from there to its own kind again by a bucket."""
    call_command("backup", str(places / "first"), stdout=io.StringIO())
    assert AuditEvent.objects.filter(action="backup made").delete()[0] == 1, "written when the backup is whole"
    manifest = backup.read_manifest(backup_place(str(places / "first")))
    empty = [model for model in backup.saved_models() if not manifest.rows[model._meta.db_table]]
    alias, last = "default", dict[str, str]()
    for hop, place in ((1, str(places / "first")), (2, bucket)):
        machine = {"INSPECTOR_DATA": str(places / f"data-{hop}"), "INSPECTOR_FILES": str(places / f"files-{hop}")}
        if hop == 2:
            saved = manage("backup", place, **{**machine, **last, "INSPECTOR_DATA": str(places / "data-1")})
            assert saved.returncode == 0 and "The backup is whole." in saved.stdout, saved.stderr
            mark = places / "files-2" / storage_mark.MARK
            mark.parent.mkdir(parents=True)
            mark.write_text("another")
        alias, url = other_databases()
        how = ["--keep-access", *["--adopt-files"] * (hop - 1)]
        restored = manage("restore", place, *how, DATABASE_URL=url, **machine)
        assert restored.returncode == 0, restored.stderr
        assert AuditEvent.objects.using(alias).filter(action="backup restored").delete()[0] == 1
        for model in backup.saved_models():
            assert rows(model, alias) == rows(model, "default"), (hop, model)
        copied = {one.relative_to(places / f"files-{hop}"): one.read_bytes()
                  for one in (places / f"files-{hop}").rglob("*.jsonl")}
        assert copied == {Path("exports/abc/run.jsonl"): b'{"a": 1}\n' * 1000}
        assert [one.name for one in (places / f"files-{hop}" / "machines").glob("*")] == ["database"] * (hop - 1)
        last = {"DATABASE_URL": url, "INSPECTOR_FILES": machine["INSPECTOR_FILES"]}
    assert mark.read_text() not in ("", "another")
    arrays = {field.model for model in backup.saved_models() for field in model._meta.concrete_fields
              if isinstance(field, ArrayField)}
    assert len(arrays) >= 5 and not arrays & set(empty), "the test has no row with such an array"
    new = Run(name="after", kind=Run.Kind.IMPORT)
    new.save(using=alias)  # the counters of keys stand behind the keys that are held
    assert new.pk > filled.pk
    again = manage("restore", place, **{**machine, "DATABASE_URL": url})
    assert again.returncode == 1 and "The database is not empty: it has" in again.stderr


def test_a_backup_while_an_import_runs_is_one_moment(
    places: Path, other_databases: Callable[[], tuple[str, str]]
) -> None:
    source = places / "many.jsonl"
    with source.open("wb") as file:
        inspector_jsonl.write((chain(f"t{n}", turns=4, seed=n, hostile="é") for n in range(N_TRAJECTORIES)), file)
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "inspector.settings", "DATABASE_URL": database_url(),
        "INSPECTOR_DATA": str(places / "importer"), "INSPECTOR_FILES": str(places / "source"),
    }
    importer = subprocess.Popen(
        [sys.executable, "-c", IMPORTER, str(source), str(places / "is saved"), f"t{N_TRAJECTORIES - 1}"], cwd=ROOT,
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )
    try:
        wait_until(
            lambda: StoredTrajectory.objects.exists() or importer.poll() is not None, 240, "the import has begun"
        )
        call_command("backup", str(places / "saved"), stdout=io.StringIO())
        (places / "is saved").touch()
        assert importer.wait(300) == 0, importer.stderr
    finally:
        importer.kill()
        importer.wait()
    alias, url = other_databases()
    restored = manage(
        "restore", str(places / "saved"), DATABASE_URL=url, INSPECTOR_DATA=str(places / "data"),
        INSPECTOR_FILES=str(places / "files"),
    )
    assert restored.returncode == 0, restored.stderr
    run = Run.objects.using(alias).get()
    kept = StoredTrajectory.objects.using(alias).count()
    assert run.status == Run.Status.RUNNING and run.n_trajectories == kept
    assert 0 < kept < StoredTrajectory.objects.count() == N_TRAJECTORIES
    assert run.n_steps == sum(StoredTrajectory.objects.using(alias).values_list("n_steps", flat=True)) == 4 * kept
    # What was finished then is the same now: every row and array of it.
    keys = list(StoredTrajectory.objects.using(alias).values_list("pk", flat=True))
    for model in backup.saved_models():
        fields = {field.name for field in model._meta.concrete_fields if field.is_relation}
        for path in ("trajectory", "step__trajectory", "row__trajectory"):
            if path.partition("__")[0] in fields:
                held = rows(model, alias)
                assert held == {key: row for key, row in rows(model, "default").items() if key in held}, model
                assert rows(model, alias).keys() == rows(model, "default", **{f"{path}__in": keys}).keys(), model


def test_a_file_that_goes_meanwhile_has_the_database_read_again(
    filled: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, asked = backup._copy_file, []

    def lose(key: str, target: Any) -> Any:
        if not asked:
            files.delete("exports/abc/run.jsonl")
            Job.objects.filter(kind="export").delete()
        asked.append(key)
        return copy(key, target)

    monkeypatch.setattr(backup, "_copy_file", lose)
    call_command("backup", str(places / "saved"), stdout=io.StringIO())
    manifest = backup.read_manifest(backup_place(str(places / "saved")))
    assert not manifest.gone and "exports/abc/run.jsonl" not in {part.name for part in manifest.files}
    assert manifest.rows["rollouts_job"] == 0
    assert [one.name for one in (places / "saved").glob("tables-*")] == ["tables-2"]


def test_segments_that_come_and_go_between_two_lists_of_files(
    filled: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the snapshot names has the database read again, and one that nothing names does not."""
    monkeypatch.setattr(SegmentTokens, "min_tokens", 1)
    save_tables, copy = backup._save_tables, backup._copy_file
    replaced = _in_segments(filled.project)
    for _ in move_run(replaced, "database"):
        pass
    (unnamed,) = replaced.token_segments.values_list("key", flat=True)

    def meanwhile(target: Any, folder: str) -> Any:
        if folder != "tables-1":
            return save_tables(target, folder)
        run = _in_segments(filled.project)
        try:
            return save_tables(target, folder)
        finally:
            delete_run(run)

    def lose(key: str, target: Any) -> Any:
        files.delete(unnamed)
        return copy(key, target)

    monkeypatch.setattr(backup, "_save_tables", meanwhile)
    monkeypatch.setattr(backup, "_copy_file", lose)
    call_command("backup", str(places / "saved"), stdout=io.StringIO())
    manifest = backup.read_manifest(backup_place(str(places / "saved")))
    assert not manifest.gone and manifest.rows["rollouts_run"] == Run.objects.count()
    assert [one.name for one in (places / "saved").glob("tables-*")] == ["tables-2"]


def _in_segments(project: Any) -> Run:
    run = create_run(Run.Kind.IMPORT, "segments", project=project, token_store="segments")
    values = [chain()]
    save_trajectories(run, values, encoded=encode_trajectories(values, put_for=run))
    return run


def test_a_backup_of_an_older_schema_is_restored_and_migrated(
    filled: Run, places: Path, other_databases: Callable[[], tuple[str, str]]
) -> None:
    """Nor does what let somebody in work again: it may have been ended since the backup."""
    ada = get_user_model().objects.create_user("ada")
    create_api_key(ada, "trainer")
    create_share(ada, filled)
    invite(filled.project, Role.MEMBER, ada, 7)
    session = SessionStore()
    session.create()
    newest = max(name for app, name in MigrationLoader(connection).graph.nodes if app == OLDER[0])
    try:
        MigrationExecutor(connection).migrate([OLDER])
        backup.back_up(backup_place(str(places / "saved")), lambda _: None)
    finally:
        MigrationExecutor(connection).migrate([(OLDER[0], newest)])
    assert [OLDER[0], newest] not in json.loads((places / "saved" / "manifest.json").read_text())["migrations"]
    alias, url = other_databases()
    machine = {"INSPECTOR_DATA": str(places / "data"), "INSPECTOR_FILES": str(places / "files")}
    restored = manage("restore", str(places / "saved"), DATABASE_URL=url, **machine)
    assert restored.returncode == 0, restored.stderr
    assert "sessions are ended." in restored.stdout
    assert not Session.objects.using(alias).exists() and not LoginSession.objects.using(alias).exists()
    for model in (ApiToken, ShareLink, Invitation):
        kept = model.objects.using(alias)
        assert kept.count() == model.objects.count() > 0 and not kept.filter(revoked_at=None).exists(), model
    assert (OLDER[0], newest) in MigrationRecorder(connections[alias]).applied_migrations()
    assert rows(StepTokens, alias) == rows(StepTokens, "default") != {}


def test_files_that_always_go_are_named(filled: Run, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_copy_file", lambda key, target: None)
    with pytest.raises(CommandError, match=r"files were deleted .* such as \w+/"):
        call_command("backup", str(places / "saved"), stdout=io.StringIO())


def refused(place: Path) -> str:
    with pytest.raises((CommandError, ValueError)) as caught:
        restore.restore(backup_place(str(place)), lambda _: None)
    return str(caught.value)


def test_what_is_no_whole_backup_is_refused(filled: Run, places: Path) -> None:
    saved = places / "saved"
    call_command("backup", str(saved), stdout=io.StringIO())
    with pytest.raises(CommandError, match="There are files already"):
        call_command("backup", str(saved), stdout=io.StringIO())
    call_command("flush", interactive=False, verbosity=0, inhibit_post_migrate=True)
    before = {model: len(rows(model, "default")) for model in backup.saved_models()}
    assert "no manifest.json" in refused(places / "nowhere")
    manifest = json.loads((saved / "manifest.json").read_text())

    def with_manifest(**changes: Any) -> str:
        (saved / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        return refused(saved)

    files.put(storage_mark.MARK, io.BytesIO(b"another"))
    assert "belong to another database (another). Name an empty place." in refused(saved)
    storage_mark.adopt()
    assert "format 9" in with_manifest(format=9)
    assert "cannot be read" in with_manifest(rows="many")
    newer = [*manifest["migrations"], ["rollouts", "9999_of_tomorrow"]]
    assert "knows no migration rollouts.9999_of_tomorrow" in with_manifest(migrations=newer)
    older = [one for one in manifest["migrations"] if one[0] != "sessions"]
    assert "newer than the backup (sessions." in with_manifest(migrations=older)
    assert "rollouts_run has 2 rows in the backup, not 5" in with_manifest(rows={**manifest["rows"], "rollouts_run": 5})
    elsewhere = {"name": "../manifest.json", "size": 1, "sha256": "0" * 64}
    assert "no storage takes" in with_manifest(files=[elsewhere])
    assert "no storage takes" in with_manifest(tables={"rollouts_run": [elsewhere]})
    assert "knows no table rollouts_wish" in with_manifest(tables={"rollouts_wish": []})
    part = saved / manifest["tables"]["rollouts_steptokens"][0]["name"]
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "steptokens/00000.arrow of the backup is damaged" in with_manifest()
    part.unlink()
    assert "lacks tables-1/rollouts_steptokens/00000.arrow" in with_manifest()
    assert {model: len(rows(model, "default")) for model in backup.saved_models()} == before


def test_a_wrong_place_is_a_sentence_without_its_secret() -> None:
    for named in ("s3://bucket?secret=hidden", "ftp://host/hidden", "s3:///hidden"):
        with pytest.raises(ValueError, match="The place of the backup") as caught:
            backup_place(named)
        assert "hidden" not in str(caught.value)
    assert storages["default"] is not backup_place("/somewhere")
