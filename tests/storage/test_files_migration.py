"""The migration that moves the files of an older installation into the file storage, and takes paths out of rows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.jobs.exports import exports as exporting
from rollouts.store import files
from rollouts.store.models import Job, Run, Tokenizer
from rollouts.store.people.tokenizers import byte_table, load_tokenizer
from rollouts.worker.jobs import do_job
from tests.samples.formats import GYM, jsonl

pytestmark = pytest.mark.django_db(transaction=True)

BEFORE, (AFTER,) = ("rollouts", "0021_large_lists"), MigrationLoader(None).graph.leaf_nodes("rollouts")


def migrate(to: tuple[str, str]) -> Any:
    """The models of a state, once the database is in it."""
    MigrationExecutor(connection).migrate([to])
    return MigrationExecutor(connection).loader.project_state([to]).apps


@pytest.fixture(params=["folder", "bucket"])
def data(request: pytest.FixtureRequest, tmp_path: Path, settings: Any) -> Path:
    """An old data folder, whose files go into a folder or straight into a bucket."""
    settings.INSPECTOR_DATA = tmp_path / "data"
    (tmp_path / "data" / "tmp").mkdir(parents=True)
    if request.param == "bucket":
        entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": request.getfixturevalue("bucket")}))
        settings.STORAGES = {**settings.STORAGES, "default": entry}
    byte_table.cache_clear()
    return tmp_path / "data"


@pytest.fixture
def old() -> Iterator[Any]:
    yield migrate(BEFORE)
    migrate(AFTER)


def held(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def down() -> None:
    raise files.StorageDown("The file storage did not answer.")


def test_an_older_installation_keeps_its_files(
    old: Any, data: Path, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = old.get_model("rollouts", "Tokenizer").objects
    fields = {"sha256": "0" * 64, "vocab_size": 1, "encoder": "tokenizers"}
    digest, lost = "a" * 64, "b" * 64
    shutil.copytree(tiny_tokenizer, data / "tokenizers" / digest)
    (data / "tokenizers" / digest / ".hidden").write_bytes(b"of a file manager")
    tokenizers.create(name="kept", path=f"/old/data/tokenizers/{digest}", source="/srv/models/qwen 3", **fields)
    tokenizers.create(name="lost", path=f"/old/data/tokenizers/{lost}", source="Qwen/Qwen3-4B", **fields)
    runs = old.get_model("rollouts", "Run").objects
    jobs = old.get_model("rollouts", "Job").objects
    half, local, done = (runs.create(code=name, name=name, kind="import") for name in ("half", "local", "done"))
    upload, given = data / "uploads" / "half" / "a b.jsonl", tmp_path / "given.jsonl"
    upload.parent.mkdir(parents=True)
    upload.write_bytes(jsonl(GYM))
    given.write_bytes(jsonl(GYM))
    options = {"format": "auto", "use_recorded_tokenizer": True}
    for run, path in ((half, upload), (local, given), (done, tmp_path / "gone.jsonl")):
        jobs.create(kind="import", run=run, options={"files": [str(path)], **options})
    jobs.create(
        kind="export", code="2345", run=done, status="done", options={"format": "own_jsonl"},
        expires_at=timezone.now() + timedelta(days=1),
    )  # fmt: skip
    (data / "exports").mkdir()
    (data / "exports" / "2345.jsonl").write_bytes(b"exported")
    before = held(data)
    with monkeypatch.context() as patched:
        put = files.put
        patched.setattr(files, "put", lambda key, path: down() if key.startswith("exports/") else put(key, path))
        with pytest.raises(files.StorageDown):
            migrate(AFTER)
    assert before.items() <= held(data).items()  # the program of before runs on
    migrate(AFTER)
    kept = Tokenizer.objects.get(name="kept")
    assert (kept.files_sha256, kept.source) == (digest, "qwen 3")
    assert load_tokenizer(digest).vocab_size == byte_table(digest).vocab_size
    with pytest.raises(TokenizerUnusable, match="Register the same tokenizer again"):
        load_tokenizer(Tokenizer.objects.get(name="lost").files_sha256)
    assert files.read_range(exporting.key_of(Job.objects.get(code="2345")), 0, 99) == b"exported"
    for job in Job.objects.filter(kind="import"):
        assert str(tmp_path) not in str(job.options)
        do_job(job.pk)
    assert dict(Run.objects.values_list("code", "status")) == {"half": "done", "local": "done", "done": "failed"}
    assert given.exists() and (data / "files").is_dir() == (files.default_storage.folder is not None)
    assert not {"tokenizers", "uploads", "exports"} & {path.name for path in data.iterdir()}
