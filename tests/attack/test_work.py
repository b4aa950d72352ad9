"""Background work whose worker goes away: it is taken up again, or ends with a sentence, and can always be removed."""

import html
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from django.core.cache import cache
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import CommandError, call_command
from django.db import DataError, OperationalError, connection
from django.test import Client
from django.utils import timezone

from inspector.server import health
from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.outputs import draft_file
from rollouts.jobs import diagnosis, run_actions, template_checks
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import import_join, imports
from rollouts.jobs.imports.uploads import kept_codes
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.jobs.replays import trajectory_replays
from rollouts.jobs.storage import unused_files
from rollouts.store import files, storage_mark
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.jobs import adopt_jobs, ask_job, take_job
from rollouts.store.models import Job, Run, StoredTrajectory, TokenSegment
from rollouts.store.runs.imports import imported
from rollouts.store.runs.runs import create_run, end_run, start_run
from rollouts.store.trajectories import token_segments
from rollouts.store.trajectories.findings import replace_findings
from rollouts.store.trajectories.save_trajectories import add_new_trajectories
from rollouts.worker import jobs
from tests import faults
from tests.conftest import ModelGate, wait_until
from tests.people import make_member
from tests.samples.chat_templates import BROKEN
from tests.samples.formats import GYM, changed, jsonl
from tests.web.samples import stored_run, trajectory
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

FULL = OperationalError("database or disk is full")
"""For states that an outage leaves behind; a disk that is really full: `test_a_full_disk_is_waited_for`."""


def lines(first: int, n: int) -> bytes:
    return jsonl(*[changed(GYM, "_ng_task_index", to=first + k) for k in range(n)])


def kept_of(run: Run) -> bool:
    """Whether uploads of a run are kept."""
    return run.code in kept_codes()


@pytest.fixture
def asked(sent: list[int]) -> Job:
    """The job of an upload of two files."""
    run = create_run("import", "files")
    uploads = [SimpleUploadedFile(name, lines(10 * n, 3)) for n, name in enumerate(("a.jsonl", "b.jsonl"))]
    imports.send_import(run, imports.ask_for_uploads(run, uploads, "auto", True))
    return run.jobs.get()


@pytest.fixture
def web(django_user_model: Any) -> Client:
    client = Client()
    client.force_login(make_member("ada", password="a long password"))
    return client


def run_of(job: Job) -> Run:
    return Run.objects.get(jobs=job)


def look_again(job: Job) -> Job:
    """A worker takes the job up after its worker was silent for long enough."""
    faults.let_time_pass()
    assert [one.pk for one in adopt_jobs()] == [job.pk]
    jobs.do_job(job.pk)
    job.refresh_from_db()
    return job


def break_off(monkeypatch: pytest.MonkeyPatch, error: BaseException, times: int = 1) -> None:
    """The import breaks off at the second trajectory of its second file, so many times."""
    real, left = imports.diagnosis_for, times

    def diagnose(value: Any, run: Run) -> Any:
        nonlocal left
        if left and value.external_id.startswith("11-"):
            left -= 1
            raise error
        return real(value, run)

    monkeypatch.setattr(imports, "diagnosis_for", diagnose)


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_work_goes_on_after_each_way_to_lose_its_worker(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    """H1, M8, L8: kill -9 of the pool's child, kill -9 of the main process, SIGTERM as by a supervisor."""
    (tmp_path / "a.jsonl").write_bytes(lines(0, 5))
    (tmp_path / "b.jsonl").write_bytes(lines(10, 3000))
    run = create_run("import", "files")
    job = imports.ask(run, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    maker = Maker(tiny_tokenizer)
    asked = [job, *work_on_runs(maker.run([maker.conversation(f"t{n}") for n in range(20)]))]
    for n, kill in enumerate((faults.kill_child, faults.kill_main, lambda worker: faults.stop(worker, 0.2))):
        for one in asked if n == 2 else [job]:
            current_app.send_task("rollouts.do_job", (one.pk,))
        if n != 1:  # the first worker lives on without its child
            worker = celery_worker_process("default", pool="prefork", threads=1 + n // 2)
        wait_until(lambda: run.trajectories.filter(index__gte=5).exists(), 120, "a part of the second file is stored")
        kill(worker)
        job.refresh_from_db()
        assert (job.status, job.attempt) == ("running", n + 1)
        StoredTrajectory.objects.filter(run=run, index__gte=5).delete()  # so that the next worker is seen at work
        faults.let_time_pass()
    lost = set(Job.objects.filter(status="running").values_list("pk", flat=True))
    celery_worker_process("default", pool="prefork", threads=2)
    for one in asked:
        faults.wait_for(one, "done")
    run.refresh_from_db()
    assert (run.status, run.n_trajectories, run.n_rejected, job.attempt) == ("done", 3005, 0, 4)
    assert list(run.trajectories.order_by("index").values_list("index", flat=True)) == list(range(3005))
    assert {one.pk for one in asked[1:] if one.attempt > 1} == lost - {job.pk}
    export = Job.objects.get(kind="export")
    assert files.size(exports.key_of(export)) == export.bytes_written > 0


def work_on_runs(run: Run) -> list[Job]:
    """A job of each kind but an import."""
    pushed = create_run("import", "pushed", status=Run.Status.DONE)
    add_new_trajectories(pushed, [trajectory(f"t{n}") for n in range(40)])
    check = template_checks.ask(None, register_chat_template(BROKEN))[0]
    return [
        *(ask_job(run, kind)[0] for kind in ("replay", "diagnose")),
        ask_job(run, "export", {"format": "own_jsonl"})[0],
        ask_job(pushed, "diagnose_pushed")[0],
        trajectory_replays.ask(run.trajectories.get(index=0))[0].job,
        check.job,
    ]


@pytest.mark.sqlite_only  # of a PostgreSQL the disk is not ours to fill
@pytest.mark.django_db(transaction=True)
def test_a_full_disk_is_waited_for(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, L17: a full disk in mid-import costs no import."""
    run = create_run("import", "files")
    uploads = [SimpleUploadedFile("a.jsonl", lines(0, 3)), SimpleUploadedFile("b.jsonl", lines(10, 300))]
    imports.send_import(run, imports.ask_for_uploads(run, uploads, "auto", True))
    asked, real = run.jobs.get(), imports.diagnosis_for
    with ExitStack() as full:

        def fill(value: Any, of: Run) -> Any:
            if value.external_id.startswith("11-"):
                full.enter_context(faults.full_database())
            return real(value, of)

        monkeypatch.setattr(imports, "diagnosis_for", fill)
        jobs.do_job(asked.pk)
        monkeypatch.setattr(imports, "diagnosis_for", real)
    asked.refresh_from_db()
    run.refresh_from_db()
    assert (asked.status, run.status, run.n_trajectories) == ("running", "running", 3)
    assert "disk of the server is full" in asked.error
    assert (look_again(asked).status, asked.error, asked.attempt) == ("done", "", 2)
    assert (run_of(asked).status, run_of(asked).n_trajectories) == ("done", 303)


if connection.vendor == "postgresql":  # SQLite has no connection that can be lost

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("side", ["server", "client"])
    def test_a_connection_that_is_lost_costs_no_import(
        side: str, asked: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """L17: the import failed when PostgreSQL was restarted."""
        real, ended = imports.diagnosis_for, False

        def lose_connection(value: Any, run: Run) -> Any:
            nonlocal ended
            if value.external_id.startswith("11-") and not ended:
                ended = True
                if side == "client":  # the next use raises another error than a server that has gone
                    connection.connection.close()
                    return real(value, run)
                with connection.cursor() as cursor, pytest.raises(OperationalError):
                    cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            return real(value, run)

        monkeypatch.setattr(imports, "diagnosis_for", lose_connection)
        jobs.do_job(asked.pk)
        assert (Job.objects.get().status, run_of(asked).n_trajectories) == ("running", 3)
        assert "database did not answer" in Job.objects.get().error
        assert look_again(asked).status == "done" and run_of(asked).n_trajectories == 6


def test_the_command_says_that_an_outage_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines(10, 3))
    break_off(monkeypatch, FULL)
    with pytest.raises(CommandError, match="A worker of the queue default goes on"):
        call_command("import_rollouts", str(tmp_path / "b.jsonl"))
    assert look_again(Job.objects.get()).status == "done" and Run.objects.get().n_trajectories == 3


def test_an_outage_that_lasts_ends_with_a_sentence_and_can_be_resumed(
    asked: Job, monkeypatch: pytest.MonkeyPatch, web: Client
) -> None:
    break_off(monkeypatch, FULL, times=5)
    jobs.do_job(asked.pk)
    page = web.get(f"/runs/{run_of(asked).code}").content.decode()
    assert "The disk of the server is full. It is tried again: this is try 1 of 5." in page
    for _ in range(jobs.MAX_ATTEMPTS):
        look_again(asked)
    run = run_of(asked)
    assert (asked.status, run.status, run.n_trajectories) == ("failed", "failed", 3)
    assert run.error == "It was tried 5 times. The last time it broke off: The disk of the server is full."
    assert 'id="resume"' in web.get(f"/runs/{run.code}").content.decode() and kept_of(run)
    web.post(f"/runs/{run.code}/resume")
    jobs.do_job(run.jobs.latest("pk").pk)
    run.refresh_from_db()
    assert (run.status, run.error, run.n_trajectories) == ("done", "", 6) and not kept_of(run)


def test_the_end_of_an_import_is_stored_when_the_database_is_back(asked: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: the database that failed could not store the failure, and run and job were left behind."""
    break_off(monkeypatch, RuntimeError("a fault"), times=2)
    with monkeypatch.context() as full:
        full.setattr(import_join, "end_import", lambda *_: (_ for _ in ()).throw(FULL))
        jobs.do_job(asked.pk)
    assert (run_of(asked).status, Job.objects.get().status) == ("running", "running")
    assert look_again(asked).status == "failed" and run_of(asked).status == "failed"
    assert "a fault" in run_of(asked).error and run_of(asked).n_trajectories == 3


class Panic(BaseException):
    """A panic of native code is no Exception."""


def test_a_panic_ends_with_a_sentence(asked: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, H2: it passed every `except Exception`."""
    break_off(monkeypatch, Panic("index out of bounds"))
    jobs.do_job(asked.pk)
    run = run_of(asked)
    assert (run.status, run.jobs.get().status, run.n_trajectories) == ("failed", "failed", 3)
    assert "Panic: index out of bounds" in run.error


STATES = ("queued", "queued for long", "running", "silent", "waiting for an outage", "failed", "cancelled", "done")


def bring_to(state: str, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    if state == "queued":
        return
    if state == "queued for long":
        Job.objects.update(heartbeat_at=timezone.now() - timedelta(hours=1))
    elif state == "cancelled":
        run_actions.cancel(run_of(job))
    elif state == "done":
        jobs.do_job(job.pk)
    else:
        break_off(monkeypatch, RuntimeError() if state == "failed" else FULL)
        monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 1)
        jobs.do_job(job.pk)
        if state == "silent":
            faults.let_time_pass()


@pytest.mark.parametrize("state", STATES)
def test_an_import_can_be_deleted_in_every_state(
    state: str, asked: Job, monkeypatch: pytest.MonkeyPatch, web: Client
) -> None:
    """H1: `delete` was refused. M7: the uploads stayed for ever."""
    bring_to(state, asked, monkeypatch)
    run = run_of(asked)
    assert "Delete this run" in web.get(f"/runs/{run.code}").content.decode()
    web.post(f"/runs/{run.code}/delete", {"sure": "yes"})
    assert not Run.objects.exists() and not StoredTrajectory.objects.exists() and not kept_of(run)
    jobs.do_job(asked.pk)  # its message comes late
    assert not Run.objects.exists()


@pytest.mark.parametrize("state", ["queued", "queued for long", "running", "silent", "waiting for an outage"])
def test_an_import_can_be_cancelled_in_every_state(
    state: str, asked: Job, monkeypatch: pytest.MonkeyPatch, web: Client
) -> None:
    """H1: cancel changed nothing. What was stored of a file goes."""
    bring_to(state, asked, monkeypatch)
    run = run_of(asked)
    assert run.n_trajectories == (0 if state.startswith("queued") else 4)  # one of them is of the second file
    web.post(f"/runs/{run.code}/cancel")
    if state in ("running", "waiting for an outage"):  # no worker is known to be lost yet
        assert run_of(asked).cancel_requested
        look_again(asked)
    run = run_of(asked)
    assert (run.status, run.jobs.get().status, kept_of(run)) == ("cancelled", "cancelled", False)
    assert run.n_trajectories == run.trajectories.count() == imported(run)["next_index"]


def test_a_worker_that_was_only_slow_does_not_revive_a_deleted_import(
    asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = take_job(asked.pk)
    assert slow is not None
    real = imports.diagnosis_for

    def delete(*arguments: Any) -> Any:
        for run in Run.objects.all():
            run_actions.delete(run)
        return real(*arguments)

    monkeypatch.setattr(imports, "diagnosis_for", delete)
    jobs.work_on(slow)
    assert not Run.objects.exists() and not StoredTrajectory.objects.exists()


def test_a_worker_that_was_only_slow_does_not_cancel_what_is_queued_again(
    asked: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for the end of the job: another worker takes it up."""
    slow = take_job(asked.pk)
    assert slow is not None
    real, adopted = imports.diagnosis_for, list[Job]()

    def silent(*arguments: Any) -> Any:
        if not adopted:
            faults.let_time_pass()
            adopted.extend(adopt_jobs())
        return real(*arguments)

    monkeypatch.setattr(imports, "diagnosis_for", silent)
    jobs.work_on(slow)
    asked.refresh_from_db()
    assert (asked.status, asked.attempt, [one.pk for one in adopted]) == ("queued", 1, [asked.pk])
    jobs.do_job(asked.pk)
    asked.refresh_from_db()
    assert (asked.status, run_of(asked).status, run_of(asked).n_trajectories) == ("done", "done", 6)


@pytest.mark.parametrize("kind", ["launch", "import"])  # an import without a job: a recorder wrote it
def test_a_run_whose_writer_is_lost_can_be_cancelled(kind: str, web: Client) -> None:
    run = create_run(kind, "lost", model="demo")
    start_run(run)
    web.post(f"/runs/{run.code}/cancel")
    assert (Run.objects.get().status, Run.objects.get().cancel_requested) == ("running", True)  # its writer may live
    Run.objects.update(heartbeat_at=timezone.now() - timedelta(seconds=30))
    web.post(f"/runs/{run.code}/cancel")
    assert Run.objects.get().status == "cancelled"


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_launch_is_deleted_while_its_worker_samples(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], slow_model: dict[str, str], web: Client,
    model_gate: ModelGate,
) -> None:
    worker = celery_worker_process("engine.demo", env=slow_model)
    model_gate.hold(after=32)
    run, other = (launch(LaunchSettings(prompts=20, group=1, seed=seed)) for seed in (1, 2))
    wait_until(lambda: run.trajectories.filter(status="done").exists(), 240, "a trajectory is done")
    web.post(f"/runs/{run.code}/delete", {"sure": "yes"})
    assert list(Run.objects.all()) == [other]
    model_gate.open()
    wait_until(lambda: Run.objects.get().status == "done", 240, "the other run has ended")
    assert worker.poll() is None and Run.objects.get().n_finished == 20
    assert StoredTrajectory.objects.count() == 20 and not Run.objects.get().n_failed


def test_readers_are_told_of_a_part_of_a_file(asked: Job, monkeypatch: pytest.MonkeyPatch, web: Client) -> None:
    """H1: a file was half stored and shown like a whole one."""
    bring_to("running", asked, monkeypatch)
    Job.objects.update(error="")
    run = run_of(asked)
    assert "A part of the file that is being read is shown already" in web.get(f"/runs/{run.code}").content.decode()
    assert web.get(f"/runs/{run.code}.json").json()["progress"]["partial"]
    assert web.get(f"/runs/{run.code}/export").status_code == 409
    assert look_again(asked).status == "done"
    assert "being read is shown" not in web.get(f"/runs/{run.code}").content.decode()
    assert web.get(f"/runs/{run.code}/export").status_code == 200


def test_rejected_lines_are_counted_once_after_a_lost_worker(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run("import", "files")
    uploads = [SimpleUploadedFile(name, lines(10 * n, 3) + b"{\n") for n, name in enumerate(("a.jsonl", "b.jsonl"))]
    imports.send_import(run, imports.ask_for_uploads(run, uploads, "auto", True))
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 1)
    job = run.jobs.get()
    real, n = imports.note_imported, 0

    def note(*arguments: Any) -> None:
        nonlocal n
        n += 1
        if n == 2:
            raise FULL
        real(*arguments)

    monkeypatch.setattr(imports, "note_imported", note)
    jobs.do_job(job.pk)
    assert run_of(job).n_rejected == 2
    assert look_again(job).status == "done"
    assert (run_of(job).n_rejected, run.rejections.count()) == (2, 2)


def test_a_job_that_cannot_be_sent_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis and the worker may go together."""
    job = ask_job(stored_run(1), "diagnose")[0]
    assert take_job(job.pk)
    faults.let_time_pass()
    answers = ["Redis does not answer.", ""]
    monkeypatch.setattr(jobs, "send_task", lambda *_: answers.pop(0))
    jobs._adopt()
    assert Job.objects.get().status == "running"
    jobs._adopt()
    assert Job.objects.get().status == "queued" and not answers


def test_the_files_of_exports_go_with_their_run(web: Client) -> None:
    """M7."""
    run = stored_run(2)
    job = ask_job(run, "export", {"format": "own_jsonl"})[0]
    jobs.do_job(job.pk)
    exports.drop_files()
    assert files.exists(exports.key_of(job))
    web.post(f"/runs/{run.code}/delete", {"sure": "yes"})
    assert not files.exists(exports.key_of(job))


@pytest.fixture
def small_storage(settings: Any, tmp_path: Path) -> Iterator[faults.SmallDisk]:
    """The file storage on a small disk of its own."""
    disk = faults.SmallDisk(tmp_path / "disk", 4)
    backend = "rollouts.store.files.folder.FolderStorage"
    entry = {"BACKEND": backend, "OPTIONS": {"location": str(disk.folder / "files")}}
    settings.STORAGES = {**settings.STORAGES, "default": entry}
    yield disk
    disk.close()


def test_an_upload_that_cannot_be_kept_leaves_nothing(small_storage: faults.SmallDisk, web: Client) -> None:
    """M7: a full disk."""
    web.raise_request_exception = False
    before = kept_codes()
    small_storage.fill()
    answer = web.post("/import", {"files": SimpleUploadedFile("a.jsonl", lines(0, 1)), "format": "auto"})
    assert answer.status_code == 507 and "disk of the server is full" in answer.content.decode()
    assert not Run.objects.exists() and kept_codes() == before


# -- pushes ------------------------------------------------------------------------------------------------------------


def test_a_pile_that_always_fails_does_not_block_later_ones(
    sent: list[int], monkeypatch: pytest.MonkeyPatch, web: Client
) -> None:
    """M8: every later push began at the same pile, and nobody was told."""
    monkeypatch.setattr(diagnosis, "BATCH", 2)
    run = create_run("import", "pushed", status=Run.Status.DONE)
    add_new_trajectories(run, [trajectory(name) for name in ("a", "killer", "c", "d", "e")])
    job = ask_job(run, "diagnose_pushed")[0]
    real = diagnosis.diagnosis_for

    def diagnose(value: Any, of: Run) -> Any:
        assert value.external_id not in ("a", "killer")  # a worker that tries dies
        return real(value, of)

    for _ in range(jobs.MAX_ATTEMPTS):
        assert take_job(job.pk)  # and is lost
        faults.let_time_pass()
    monkeypatch.setattr(diagnosis, "diagnosis_for", diagnose)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "failed" and job.error in html.unescape(web.get(f"/runs/{run.code}").content.decode())
    rest = Job.objects.get(status="queued")
    assert rest.pk in sent
    jobs.do_job(rest.pk)
    assert Job.objects.get(pk=rest.pk).status == "done"
    marked = run.findings.filter(evidence__contains="5 workers were lost").values_list("trajectory__external_id")
    assert {name for (name,) in marked} == {"a", "killer"}


def test_a_trajectory_whose_findings_cannot_be_stored_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run("import", "pushed", status=Run.Status.DONE)
    add_new_trajectories(run, [trajectory(name) for name in ("a", "b", "c")])
    job = ask_job(run, "diagnose_pushed")[0]
    real = replace_findings

    def store(of: Run, found: Any) -> None:
        if any(record.external_id == "b" and not findings for record, findings in found):
            raise DataError("no value for a column")
        real(of, found)

    monkeypatch.setattr(diagnosis, "replace_findings", store)
    monkeypatch.setattr(diagnosis, "diagnosis_for", lambda *_: Diagnosis((), {}))
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.n_done) == ("done", 3)
    assert "DataError: no value" in run.findings.get().evidence and run.findings.get().trajectory.external_id == "b"


# -- what is left behind, and a full disk ------------------------------------------------------------------------------


def test_leftovers_of_processes_that_were_killed_are_removed(settings: Any, tmp_path: Path, sent: list[int]) -> None:
    """M7: nothing ever removed them."""
    settings.INSPECTOR_DATA = tmp_path
    live, done, failed = (create_run("import", name) for name in ("live", "done", "failed"))
    for run in (live, done, failed):
        imports.send_import(
            run, imports.ask_for_uploads(run, [SimpleUploadedFile("a.jsonl", lines(0, 1))], "auto", True)
        )
    end_run(done, "done")
    end_run(failed, "failed", "It broke off.")
    Job.objects.filter(run=failed).update(status="failed")
    stored = tmp_path / "files"
    kept = [stored / "uploads" / run.code / "a.jsonl" for run in (live, failed)]
    gone = [stored / "uploads" / done.code / "a.jsonl", tmp_path / "in_place" / "nobody"]
    gone += [tmp_path / "tmp" / "old.upload", stored / "exports" / "nobody" / "run.jsonl"]
    gone += [stored / "uploads" / "nobody" / "a.jsonl", stored / ".drafts" / f".draft.{'0' * 16}.part"]
    gone += [tmp_path / "tmp" / f".backup.{'0' * 16}.part"]
    kept += [tmp_path / "tmp" / "new.upload", stored / "tokenizers" / "demo"]
    for path in (path for path in gone + kept if not path.exists()):
        path.parent.mkdir(exist_ok=True, parents=True)
        if path.suffix:
            path.write_bytes(b"x")
        else:
            path.mkdir()
        if path.name.startswith("old"):
            os.utime(path, (0, 0))
    with draft_file(stored / ".drafts", "draft") as alive:
        os.utime(alive.name, (0, 0))
        unused_files.sweep()
        assert Path(alive.name).exists()
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)
    Run.objects.update(finished_at=timezone.now() - timedelta(days=8))
    unused_files.sweep()
    assert kept_of(live) and not kept_of(failed)
    Run.objects.filter(pk=live.pk).update(created_at=timezone.now() - timedelta(days=2))
    unused_files.sweep()
    assert Run.objects.get(pk=live.pk).status == "queued"  # its job waits
    Job.objects.all().delete()
    unused_files.sweep()
    assert Run.objects.get(pk=live.pk).status == "failed" and not kept_of(live)


def test_leftovers_of_another_database_stay(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two installations were given one place by mistake: what the other one has stored is no leftover."""
    settings.INSPECTOR_DATA = tmp_path
    cache.clear()
    monkeypatch.setattr(token_segments, "ORPHAN_AGE", timedelta(0))
    run = create_run("import", "ours")
    TokenSegment.objects.create(run=run, key="segments/ours/a.parquet", n_items=1, n_tokens=1, n_bytes=1)
    theirs = ["uploads/theirs/a.jsonl", "exports/theirs/run.jsonl", "segments/theirs/a.parquet"]
    for key in theirs:
        files.put(key, BytesIO(b"x"))
    files.put(storage_mark.MARK, BytesIO(b"another"))
    unused_files.sweep()
    assert all(files.exists(key) for key in theirs)
    assert "The file storage belongs to another database (another; this one is " in caplog.text
    storage_mark.adopt()
    unused_files.sweep()
    assert not any(files.exists(key) for key in theirs)
    cache.clear()


def test_health_says_that_the_disk_is_full(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """L8: it said "ok"."""
    assert client.get("/health").json()["disk"] == "ok"
    monkeypatch.setattr(health, "MIN_FREE_BYTES", 1 << 60)
    answer = client.get("/health")
    assert answer.status_code == 503 and "make room" in answer.json()["disk"]


@pytest.mark.parametrize("format_name", ["own_jsonl", "own_parquet"])
def test_an_export_on_a_full_disk_leaves_nothing_and_is_tried_again(
    format_name: str, settings: Any, tmp_path: Path
) -> None:
    settings.INSPECTOR_DATA = tmp_path
    job = ask_job(stored_run(2), "export", {"format": format_name})[0]
    disk = faults.SmallDisk(tmp_path / "tmp", 4)
    try:
        disk.fill()
        jobs.do_job(job.pk)
        job.refresh_from_db()
        assert (job.status, job.error) == ("running", "The disk of the server is full.")
        assert not list(files.scratch_folder().glob(".*")) and not list(files.listed("exports/"))
        disk.make_room()
        assert look_again(job).status == "done" and files.size(exports.key_of(job)) == job.bytes_written
    finally:
        disk.close()


@pytest.mark.parametrize("address", ["/tokenizers", "/import"])
def test_a_tokenizer_on_a_full_disk_is_no_damaged_file(
    address: str, settings: Any, tmp_path: Path, tiny_tokenizer: Path, small_storage: faults.SmallDisk, web: Client
) -> None:
    """The form said that the tokenizer cannot be read."""
    settings.INSPECTOR_DATA = tmp_path
    small_storage.fill()
    web.raise_request_exception = False
    named = "upload" if address == "/tokenizers" else "tokenizer_file"
    upload = SimpleUploadedFile("tokenizer.json", (tiny_tokenizer / "tokenizer.json").read_bytes())
    answer = web.post(address, {named: upload, "files": SimpleUploadedFile("a.jsonl", lines(0, 1)), "format": "auto"})
    assert answer.status_code == 507 and "disk of the server is full" in answer.content.decode()
    assert not Run.objects.exists() and not list((tmp_path / "tmp").iterdir())
