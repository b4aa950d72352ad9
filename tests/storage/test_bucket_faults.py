"""A bucket that fails in the middle of a read or a write: it answers 500, resets, or says nothing more."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.opened import bucket
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import imports
from rollouts.store import files
from rollouts.store.jobs.jobs import adopt_jobs, ask_job
from rollouts.store.models import Job
from rollouts.store.runs.runs import create_run
from rollouts.worker import jobs
from tests import faults
from tests.faulty_bucket import FaultyBucket
from tests.s3 import S3Server
from tests.samples.server import gym_lines

pytestmark = pytest.mark.django_db(transaction=True)
N = 600


@pytest.fixture
def faulty(s3: S3Server, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    monkeypatch.setattr(bucket, "READ_SECONDS", 2)
    settings.INSPECTOR_DATA = tmp_path / "data"
    proxy = FaultyBucket(s3.url)
    address = proxy.in_front_of(s3.new_bucket())
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": address}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    yield proxy
    proxy.close()


def asked_import() -> Job:
    """One file of an import, in the bucket."""
    run = create_run("import", "files")
    imports.ask_for_uploads(run, [SimpleUploadedFile("a.jsonl", gym_lines(0, N))], "auto", True)
    return run.jobs.get()


def do_again(job: Job) -> None:
    faults.let_time_pass()
    assert job.pk in {waiting.pk for waiting in adopt_jobs()}
    jobs.do_job(job.pk)
    job.refresh_from_db()


@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_a_read_that_breaks_off_is_tried_again(faulty: FaultyBucket, fault: str) -> None:
    job = asked_import()
    faulty.fault, faulty.way, faulty.most = fault, "read", 150_000
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert faulty.n_faults and (job.status, job.error[:16]) == ("running", "The file storage")
    assert job.run.trajectories.count() == 0  # a file is stored whole or not at all
    faulty.fault = ""
    do_again(job)
    assert (job.status, job.error, job.run.trajectories.count()) == ("done", "", N)


@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_a_copy_that_breaks_off_is_none(faulty: FaultyBucket, fault: str) -> None:
    files.put("a/b", io.BytesIO(b"1" * 900_000))
    faulty.fault, faulty.way, faulty.most = fault, "read", 400_000
    with pytest.raises(files.StorageDown, match="The file storage"):
        files.local_folder("a/", "b")
    faulty.fault = ""
    assert (files.local_folder("a/", "b") / "b").read_bytes() == b"1" * 900_000


@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_a_write_that_breaks_off_leaves_nothing(faulty: FaultyBucket, fault: str) -> None:
    imported = asked_import()
    jobs.do_job(imported.pk)
    before = {file.key for file in files.listed("")}
    job = ask_job(imported.run, "export", {"format": "own_jsonl"})[0]
    faulty.fault, faulty.way, faulty.most = fault, "write", 50_000
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert faulty.n_faults and (job.status, job.error[:16]) == ("running", "The file storage")
    faulty.fault = ""
    assert {file.key for file in files.listed("")} == before
    do_again(job)
    assert (job.status, job.error) == ("done", "")
    assert files.size(exports.key_of(job)) == job.bytes_written > 0


@pytest.mark.parametrize("fault", ["500", "reset", "stall"])
def test_an_upload_that_breaks_off_leaves_no_import(faulty: FaultyBucket, fault: str) -> None:
    faulty.fault, faulty.way, faulty.most = fault, "write", 50_000
    run = create_run("import", "files")
    with pytest.raises(files.StorageDown, match="The file storage"):
        imports.ask_for_uploads(run, [SimpleUploadedFile("a.jsonl", gym_lines(0, N))], "auto", True)
    faulty.fault = ""
    assert not list(files.listed("")) and not Job.objects.exists()
