"""Jobs: a run judged anew or written to a file, by a worker that may die, be cancelled, or be sent twice."""

import io
import json
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from rollout_inspector.diagnose import VERSION
from rollout_inspector.formats import Source, read
from rollouts.jobs import diagnosis
from rollouts.jobs.exports import exports
from rollouts.store import files, models
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.jobs.jobs import JobLost, adopt_jobs, ask_job, beat_job, cancel_job, end_job, take_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker import jobs
from tests.storage.build import chain
from tests.web.samples import finding, stored_run

pytestmark = pytest.mark.django_db

LONG_AGO = timedelta(minutes=10)


def asked(run: Run, kind: str = "diagnose", **options: object) -> Job:
    job, send = ask_job(run, kind, options)
    assert send
    return job


def test_a_job_is_done_once_and_leaves_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(5, findings=[[finding()]] * 5)
    Run.objects.update(diagnosis_version=0)
    models.StoredFinding.objects.update(version=0)
    monkeypatch.setattr(diagnosis, "BATCH", 2)
    job = asked(run)
    seen: list[int] = []
    taken = take_job(job.pk)
    assert taken is not None and take_job(job.pk) is None  # a second delivery
    jobs.work_on(taken, lambda held: seen.append(held.n_done))
    job.refresh_from_db()
    run.refresh_from_db()
    assert seen == [0, 2, 4, 5] and (job.status, job.n_done, job.n_total) == ("done", 5, 5)
    assert run.diagnosis_version == VERSION
    assert {found.version for found in run.findings.all()} <= {VERSION} and "boundary_merge" not in run.finding_counts
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.attempt == 1


def test_one_of_a_kind_works_at_a_time() -> None:
    run = stored_run(1)
    job = asked(run)
    assert ask_job(run, "diagnose", {"tokenizer": "t"}) == (job, False)
    assert asked(run, "export", format="own_jsonl").kind == "export"
    jobs.do_job(job.pk)
    assert asked(run).pk != job.pk


def test_the_next_worker_goes_on_where_the_lost_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(6, findings=[[finding()]] * 6)
    monkeypatch.setattr(diagnosis, "BATCH", 2)
    lost = take_job(asked(run).pk)
    assert lost is not None
    for batch in diagnosis.diagnose_run(run):
        beat_job(lost, n_done=len(batch), reached=batch[-1].index)
        break  # it is killed here
    assert adopt_jobs() == [] and take_job(lost.pk) is None
    Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
    assert [one.pk for one in adopt_jobs()] == [lost.pk] and adopt_jobs() == []
    judged: list[int] = []
    monkeypatch.setattr(diagnosis, "_diagnose", lambda run, batch: judged.extend(record.index for record in batch))
    jobs.do_job(lost.pk)
    assert judged == [2, 3, 4, 5]
    with pytest.raises(JobLost):  # it was not dead after all: it stops, and changes nothing
        beat_job(lost, n_done=1)
    assert not end_job(lost, Job.Status.FAILED)
    assert Job.objects.get().status == "done" and Job.objects.get().n_done == 6


def test_a_lost_job_that_is_asked_otherwise_begins_anew() -> None:
    run = stored_run(1)
    first = asked(run)
    Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
    assert ask_job(run, first.kind, {}) == (first, True)
    Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
    second = asked(run, tokenizer="t")
    first.refresh_from_db()
    assert second != first and first.status == "failed" and "lost" in first.error


def test_cancel_stops_at_the_next_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(6)
    monkeypatch.setattr(diagnosis, "BATCH", 2)
    job = take_job(asked(run).pk)
    assert job is not None

    def cancel_at_four(held: Job) -> None:
        if held.n_done == 4:
            cancel_job(Job.objects.get(pk=held.pk))

    jobs.work_on(job, cancel_at_four)
    job.refresh_from_db()
    assert (job.status, job.n_done) == ("cancelled", 4)


def test_a_job_ends_with_its_run(tmp_path: Path) -> None:
    run = stored_run(4)
    job = take_job(asked(run, "export").pk)
    assert job is not None
    delete_run(run)
    with pytest.raises(JobLost):
        beat_job(job)
    jobs.do_job(job.pk)


def test_an_export_writes_a_file_that_goes_when_it_expires(tmp_path: Path) -> None:
    run = stored_run(4)
    job = asked(run, "export", format="own_jsonl")
    jobs.do_job(job.pk)
    job.refresh_from_db()
    key = exports.key_of(job)
    assert (job.status, job.n_written, job.bytes_written) == ("done", 4, files.size(key))
    with files.open_file(key) as file:
        (tmp_path / Path(key).name).write_bytes(file.read())
    assert len(list(read(Source.of_path(tmp_path / Path(key).name))[1])) == 4
    exports.drop_files()
    assert files.exists(key)
    Job.objects.update(expires_at=timezone.now())
    exports.drop_files()
    assert not files.exists(key)


def test_an_export_that_breaks_off_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(2)
    job = asked(run, "export", format="verl")
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "failed" and "cannot be exported as verl" in job.error
    job = asked(run, "export", format="own_jsonl")
    monkeypatch.setattr("rollouts.store.jobs.jobs.TELL_SECONDS", -1)
    taken = take_job(job.pk)
    assert taken is not None
    jobs.work_on(taken, lambda held: cancel_job(Job.objects.get(pk=held.pk)))
    job.refresh_from_db()
    assert job.status == "cancelled" and not list(files.listed(exports.prefix_of(job.code)))
    assert not list(files.scratch_folder().glob(".*.part"))


def test_what_a_strategy_refuses_is_noted_where_it_is_forced(tiny_tokenizer: Path) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "tiny")
    run = create_run("import", "r", tokenizer=tokenizer, chat_template=tokenizer.chat_template)
    save_trajectories(run, [chain("a", hostile=""), chain("b", hostile="")], [[], []])
    without_messages = models.StoredStep.objects.filter(trajectory__external_id="a")
    without_messages.update(messages_new=None, messages_shared=0)
    job = asked(run, "export", format="sft", strategy="tool_delta", force=True)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "done" and job.n_written == 1
    count, named = job.notes
    assert count == "1 of 2 trajectories was left out." and "Left out: Trajectory 'a'" in named


def test_the_command_is_the_same_job(sent: list[int]) -> None:
    run = stored_run(3)
    out = io.StringIO()
    call_command("diagnose", run.code, "--json", stdout=out)
    assert json.loads(out.getvalue())["trajectories"] == 3 and run.jobs.get().status == "done"
    job = asked(run)
    with pytest.raises(CommandError, match="is being diagnosed already"):
        call_command("diagnose", run.code)
    cancel_job(job)
    call_command("diagnose", run.code, "--background", stdout=out)
    assert len(sent) == 1 and run.jobs.get(pk=sent[0]).status == "queued"


def test_ctrl_c_cancels_the_job_of_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An import is not cancelled by it: a worker, or *Resume*, goes on with it."""

    def interrupted(job: Job, tell: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollouts.management.jobs.work_on", interrupted)
    run = stored_run(3)
    with pytest.raises(CommandError, match="It was cancelled"):
        call_command("diagnose", run.code)
    assert run.jobs.get().status == "cancelled"
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]]}))
    with pytest.raises(KeyboardInterrupt):
        call_command("import_rollouts", str(file))
    assert Job.objects.get(kind="import").status == "running"
