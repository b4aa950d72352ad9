"""Processes and machines that share one bucket: what is fetched at once, what a kill leaves, what an outage does."""

import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from inspector.server.env import EnvironmentReader
from inspector.server.file_storage import file_storage
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import imports
from rollouts.jobs.storage import unused_files
from rollouts.store import files
from rollouts.store.chat_templates import tokenizers
from rollouts.store.chat_templates.tokenizers import byte_table, load_tokenizer, register_tokenizer
from rollouts.store.files import cache
from rollouts.store.files.bucket import BucketStorage
from rollouts.store.jobs.jobs import adopt_jobs, ask_job
from rollouts.store.models import Job, Run, Tokenizer
from rollouts.store.runs.runs import create_run
from rollouts.worker.jobs import do_job
from tests.conftest import wait_until
from tests.s3 import S3Server
from tests.samples.formats import GYM, jsonl

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]


@pytest.fixture(autouse=True)
def shared(bucket: str, tmp_path: Path, settings: Any) -> None:
    settings.INSPECTOR_DATA = tmp_path / "data"
    (tmp_path / "data" / "tmp").mkdir(parents=True)
    entry = file_storage(EnvironmentReader({"INSPECTOR_FILES": bucket}))
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    byte_table.cache_clear()


@pytest.fixture
def web(admin_user: Any) -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(admin_user)
    return client


def in_a_fork(work: Callable[[], object]) -> int:
    """Do some work in another process. Returns its id; it ends with status 0 when the work is done."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(7)
    return pid


def status_of(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def test_two_processes_fetch_a_tokenizer_once(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who_locks: Callable[[], int]
) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")
    n_before = who_locks()
    fetch, log = BucketStorage.fetch, tmp_path / "fetched"

    def slowly(self: BucketStorage, name: str, target: Path) -> None:
        with log.open("a") as file:
            file.write(f"{name}\n")
        wait_until(lambda: who_locks() == n_before + 3, 240, "the others have come to the lock")
        fetch(self, name, target)

    monkeypatch.setattr(BucketStorage, "fetch", slowly)

    def use() -> None:
        folder = tokenizers.files_of(tokenizer.files_sha256)
        assert (folder / "tokenizer.json").read_bytes() == (tiny_tokenizer / "tokenizer.json").read_bytes()

    assert [status_of(pid) for pid in [in_a_fork(use) for _ in range(3)]] == [0, 0, 0]
    assert len(log.read_text().splitlines()) == len(list(files.listed(f"tokenizers/{tokenizer.files_sha256}/")))


def test_a_fetch_that_is_killed_is_done_again(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")

    def killed(self: BucketStorage, name: str, target: Path) -> None:
        target.write_bytes(b'{"half"')
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(BucketStorage, "fetch", killed)
        pid = in_a_fork(lambda: tokenizers.files_of(tokenizer.files_sha256))
        assert os.WTERMSIG(status_of(pid)) == signal.SIGKILL
    assert list(cache.folder().glob("*.draft/*"))
    loaded = load_tokenizer(tokenizer.files_sha256)
    assert loaded.vocab_size == tokenizer.vocab_size == byte_table(tokenizer.files_sha256).vocab_size
    assert not list(cache.folder().glob("*.draft"))


def test_a_copy_that_a_process_holds_stays_in_a_full_cache(tiny_tokenizer: Path, settings: Any) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")
    folder = tokenizers.files_of(tokenizer.files_sha256)
    settings.CACHE_BYTES = 1
    files.put("x/a", open(__file__, "rb"))  # noqa: SIM115  the test's own file
    assert (files.local_folder("x/", "a") / "a").is_file()
    assert (folder / "tokenizer.json").is_file()


def test_a_copy_that_somebody_removed_is_fetched_again(tiny_tokenizer: Path) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")
    folder = tokenizers.files_of(tokenizer.files_sha256)
    shutil.rmtree(cache.folder())
    assert not folder.exists()
    assert (tokenizers.files_of(tokenizer.files_sha256) / "tokenizer.json").is_file()


def test_a_tokenizer_whose_files_are_lost_is_told_and_mended(tiny_tokenizer: Path) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")
    files.delete_all("tokenizers/")
    files.delete_all("byte_tables/")
    for use in (load_tokenizer, byte_table):
        with pytest.raises(TokenizerUnusable, match="Register the same tokenizer again"):
            use(tokenizer.files_sha256)
    assert register_tokenizer(tiny_tokenizer, "tiny") == tokenizer
    assert byte_table(tokenizer.files_sha256).vocab_size == tokenizer.vocab_size


def test_jobs_wait_for_the_storage_and_requests_say_so(
    s3: S3Server, web: Client, tiny_tokenizer: Path, sent: list[int]
) -> None:
    upload = SimpleUploadedFile("a.jsonl", jsonl(GYM))
    assert web.post("/import", {"files": upload, "format": "auto"}).status_code == 302
    run = Run.objects.get()
    (job,) = run.jobs.all()
    s3.stop()
    try:
        do_job(job.pk)
        job.refresh_from_db()
        assert job.status == "running" and job.error.startswith("The file storage did not answer")
        assert web.get(f"/runs/{run.code}").status_code == 200
        refused = [
            web.post("/import", {"files": SimpleUploadedFile("b.jsonl", jsonl(GYM)), "format": "auto"}),
            web.post("/tokenizers.json", {"folder": str(tiny_tokenizer), "name": "tiny"}),
        ]
        assert [(one.status_code, one["Retry-After"]) for one in refused] == [(503, "30")] * 2
        assert "The file storage did not answer" in refused[1].json()["error"]
        assert Run.objects.count() == 1 and not Tokenizer.objects.exists()
    finally:
        s3.start()
    Job.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=10))
    assert [one.pk for one in adopt_jobs()] == [job.pk]
    do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "done" and list(files.listed("uploads/")) == []


def test_an_export_is_offered_from_the_bucket_and_swept(web: Client, s3: S3Server, sent: list[int]) -> None:
    run = create_run("import", "run")
    do_job(imports.ask(run, [_file(run)]).pk)
    job = ask_job(run, "export", {"format": "own_jsonl"})[0]
    do_job(job.pk)
    job.refresh_from_db()
    answer = web.get(f"/runs/{run.code}/jobs/{job.code}/file")
    assert int(answer["Content-Length"]) == job.bytes_written == len(b"".join(answer.streaming_content))
    s3.stop()
    try:
        assert web.get(f"/runs/{run.code}/jobs/{job.code}/file").status_code == 503
    finally:
        s3.start()
    unused_files.sweep()
    assert files.exists(exports.key_of(job))
    Job.objects.filter(pk=job.pk).delete()
    unused_files.sweep()
    assert list(files.listed("exports/")) == []


def _file(run: Run) -> str:
    """The key of an upload of a run."""
    key = f"uploads/{run.code}/a.jsonl"
    files.put(key, SimpleUploadedFile("a.jsonl", jsonl(GYM)))
    return key
