"""The way from a database of before the first release: `backup` with the old program, `restore` with this one.

``tests/samples/before_the_release.tar.xz`` is a backup that the old program made, by the script beside it.
"""

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client

from inspector.management import program
from inspector.management.commands.serve import Command as Serve
from inspector.server.file_storage import backup_place
from rollouts.jobs.storage import restore
from rollouts.store.database import OLD_MIGRATIONS
from rollouts.store.models import (
    ApiToken, Comment, Job, Rejection, Run, Seen, ShareLink, StoredTrajectory, TemplateCheck
)
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.conftest import ROOT

pytestmark = pytest.mark.django_db(transaction=True)

SAMPLE = ROOT / "tests" / "samples" / "before_the_release.tar.xz"
SHA256 = "c031cb4d2e771f405c5726edfd81c29a91a403ae970b46fb0118b32621c084ef"
"""Of all arrays of the sample, as the old program read them from its database."""
REFUSAL = "Make a backup with that version .* and restore it with this one into an empty database"


@pytest.fixture
def saved(tmp_path: Path, settings: Any) -> Path:
    """The backup, and an empty file storage and database to restore it into."""
    options = {"BACKEND": "rollouts.store.files.folder.FolderStorage", "OPTIONS": {"location": str(tmp_path / "files")}}
    settings.STORAGES = {**settings.STORAGES, "default": options}
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(tmp_path, filter="data")
    call_command("flush", interactive=False, verbosity=0, inhibit_post_migrate=True)
    return tmp_path / "before_the_release"


def digest_of_arrays() -> str:
    digest = hashlib.sha256()
    for stored in StoredTrajectory.objects.order_by("pk"):
        trajectory = load_trajectory(stored)
        arrays = [a for step in trajectory.steps for a in (step.prompt_ids, step.completion_ids, step.logprobs)]
        arrays += [a for row in trajectory.rows for a in (row.ids, row.loss_mask, *row.columns.values())]
        for array in arrays:
            digest.update(b"-" if array is None else array.tobytes())
    return digest.hexdigest()


def test_a_backup_of_the_old_program_is_restored_by_this_one(saved: Path) -> None:
    call_command("migrate", "rollouts", "0001_initial", verbosity=0)  # the tables of the backup
    manifest = restore.restore(backup_place(str(saved)), lambda _: None)
    assert ["rollouts", OLD_MIGRATIONS[1]] in [list(node) for node in manifest.migrations]
    applied = {name for app, name in MigrationRecorder(connection).applied_migrations() if app == "rollouts"}
    migrations = {name for app, name in MigrationLoader(connection).disk_migrations if app == "rollouts"}
    assert applied == migrations > {"0001_initial"}
    assert digest_of_arrays() == SHA256
    gallery, segments = Run.objects.order_by("pk")
    assert (gallery.n_trajectories, len(gallery.finding_counts)) == (55, 52)
    assert (segments.n_trajectories, segments.n_steps, segments.n_rows, segments.n_tokens) == (16, 29, 16, 2901)
    assert segments.finding_counts == {"logprobs_other_distribution": 5, "noncanonical_sampling": 3}
    for run in (gallery, segments):
        assert dict(Counter(run.findings.values_list("kind", flat=True))) == run.finding_counts
    assert segments.token_segments.get().n_tokens > 0 and Rejection.objects.get().line == 17
    trajectory = segments.trajectories.order_by("index").first()
    assert trajectory is not None and trajectory.training_step == 0
    comment, seen = Comment.objects.get(author__username="ada"), Seen.objects.get()
    assert (comment.trajectory, comment.text) == (trajectory, "Look at this é.") and seen.trajectory == trajectory
    assert ShareLink.objects.get().run == segments and ApiToken.objects.get().name == "a trainer"
    check = TemplateCheck.objects.get()
    assert check.status == Job.Status.DONE and check.report["checks"]
    client = Client()
    client.force_login(get_user_model().objects.get(username="local"))
    for path in ("/runs.json", "/templates", "/tokenizers", "/shares", "/tokens", f"/templates/checks/{check.code}"):
        assert client.get(path).status_code == 200, path
    for run in (gallery, segments):
        assert client.get(f"/runs/{run.code}").status_code == 200
        for code in run.trajectories.values_list("code", flat=True)[:3]:
            assert client.get(f"/trajectories/{code}").status_code == 200


def test_a_backup_of_a_migration_in_between_is_refused(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["migrations"].remove(["rollouts", OLD_MIGRATIONS[1]])
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=f"knows no migration rollouts.{OLD_MIGRATIONS[0]}. Use the version that made"):
        restore.restore(backup_place(str(saved)), lambda _: None)


@pytest.fixture
def old_database() -> Iterator[None]:
    """The test's database says that the old migrations made it."""
    recorder = MigrationRecorder(connection)
    for name in OLD_MIGRATIONS:
        recorder.record_applied("rollouts", name)
    yield
    for name in OLD_MIGRATIONS:
        recorder.record_unapplied("rollouts", name)


def test_an_old_database_is_refused_with_the_way_out(old_database: None) -> None:
    for command, options in (("migrate", {"skip_checks": False}), ("check", {"databases": ["default"]})):
        with pytest.raises(SystemCheckError, match=REFUSAL):
            call_command(command, **options)
    with pytest.raises(CommandError, match=REFUSAL):
        call_command("doctor")
    with pytest.raises(CommandError, match=REFUSAL):
        Serve().prepare()


def test_a_command_that_finds_no_column_names_the_way_out(old_database: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise OperationalError("no such column: rollouts_run.figures")

    monkeypatch.setattr("django.core.management.execute_from_command_line", fail)
    with pytest.raises(SystemExit, match=REFUSAL):
        program.run_command(["findings", "nothing"], "manage.py")


def test_a_database_of_this_version_is_not_refused() -> None:
    call_command("check", databases=["default"], stdout=io.StringIO())
    assert program.sentence_of(OperationalError("disk I/O error"), "manage.py") == ""
