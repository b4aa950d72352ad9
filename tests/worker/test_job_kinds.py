"""Every kind of job: one at a time for its subject, gone with it, and taken up after its worker was killed."""

import contextlib
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from celery import current_app
from django.conf import settings
from django.db import IntegrityError, OperationalError, connection, transaction
from django.test import Client
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.jobs import alarm_delivery, damage, parser_comparison, rescore, run_actions, template_checks
from rollouts.jobs.broker import queue_of
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import imports
from rollouts.jobs.replays import trajectory_replays
from rollouts.jobs.storage import token_moves
from rollouts.sampling.engines import ENGINES, vllm_parsers
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store import files, models
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs import jobs as job_services
from rollouts.store.jobs.job_queue import take_engine_job, take_next_job
from rollouts.store.jobs.jobs import (
    JOB_KINDS, Beat, JobKind, adopt_jobs, ask_job, cancel_job, end_job, is_active, is_silent, take_job
)
from rollouts.store.models import Job, Replay, Run, TemplateCheck
from rollouts.store.runs.alarms import set_webhook, take_alarms
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO, add_new_trajectories
from rollouts.store.trajectories.trajectories import load_trajectories, trajectory_batches
from rollouts.worker import jobs
from tests.conftest import wait_until
from tests.people import make_member
from tests.samples.chat_templates import BROKEN
from tests.samples.deaths import die_after
from tests.samples.demo_engine import DemoOwner
from tests.samples.formats import GYM, changed, jsonl
from tests.samples.shard_work import change_kind
from tests.samples.training_steps import save, store_steps, world
from tests.web.samples import stored_run, trajectory
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

LONG_AGO = timedelta(minutes=10)
Ask = Callable[[str], Job]


@pytest.fixture
def ask(tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`ask(kind)`: a job of a kind, with something to do."""
    monkeypatch.setattr(token_moves, "BATCH", 20)
    answer_at_once(monkeypatch, tiny_tokenizer)

    def go(kind: str) -> Job:
        if kind == "import":
            paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
            for n, file in enumerate(paths):
                file.write_bytes(jsonl(*[changed(GYM, "_ng_task_index", to=10 * n + k) for k in range(3)]))
            return imports.ask(create_run("import", "files"), paths)
        if kind in ("check_template", "repair_template"):
            template = register_chat_template(BROKEN)
            check, _ = template_checks.ask(None, template, repair=kind == "check_template")
            if kind == "repair_template":
                jobs.do_job(check.job.pk)
                check.refresh_from_db()
                assert template_checks.ask_for_repair(check)
            return check.job
        if kind == "replay_trajectory":
            maker = Maker(tiny_tokenizer)
            return trajectory_replays.ask(maker.run([maker.conversation("a")]).trajectories.get())[0].job
        if kind == "audit_parsers":
            maker = Maker(tiny_tokenizer)
            monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
            return parser_comparison.ask(maker.run([maker.conversation("a")]).trajectories.get(), 0)[0].job
        if kind == "gap":
            compared = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
            save(compared, world())
            return ask_job(compared, kind)[0]
        run = stored_run(45, findings=[[]] * 45)  # three batches
        if kind == "deliver_alarms":
            monkeypatch.setattr(settings, "WEBHOOK_HOSTS", ["hook.example"])
            monkeypatch.setattr(alarm_delivery, "deliver", lambda *_: "")  # the webhook takes it
            set_webhook(run.project, "https://hook.example/")
            store_steps(run, [0, 3])
            take_alarms(run)
        options = {
            "export": {"format": "own_jsonl"},
            "move_tokens": {"to": "segments"},
            "rescore": {"model": "words", "engine": "scripted"},
            "damage": {"model": "words"},
        }
        return ask_job(run, kind, options.get(kind, {}))[0]

    return go


def answer_at_once(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The model `words`, whose engine scores in the thread that asks."""

    class Owner:
        def call(self, work: Callable[[Any], Any]) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work(ScriptedEngine()))
            return future

    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], is_offered=True))
    monkeypatch.setattr(settings, "INSPECTOR_MODELS", {"words": {"engine": "scripted", "path": str(path)}})
    do: Any = partial(rescore.do_job, engine_of=lambda model, engine: Owner())
    change_kind(monkeypatch, "rescore", handler=do)
    change_kind(monkeypatch, "damage", handler=partial(damage.do_job, engine_of=lambda model, engine: DemoOwner()))


DEATHS = {
    "diagnose": 2, "export": 9, "replay": 5, "import": 13, "diagnose_pushed": 2, "replay_trajectory": 1,
    "check_template": 3, "repair_template": 2, "move_tokens": 2, "audit_parsers": 1,
    "loss_weights": 2, "rescore": 5, "gap": 2, "deliver_alarms": 1,
    "damage": 25,
}
"""Signs of life after which the first worker of each kind is killed: in the middle, where its work has one."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", JOB_KINDS)
def test_a_worker_that_is_killed_is_followed_by_another(kind: str, ask: Ask) -> None:
    job = ask(kind)
    die_after(DEATHS[kind], lambda: jobs.do_job(job.pk))
    job.refresh_from_db()
    assert (job.status, job.attempt) == ("running", 1) and take_job(job.pk) is None and adopt_jobs() == []
    Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
    assert is_silent(Job.objects.get()) and [one.pk for one in adopt_jobs()] == [job.pk] and adopt_jobs() == []
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.error) == ("done", 2, "")
    RESULTS[kind](job)


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", JOB_KINDS)
def test_each_kind_passes_another_writer(kind: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another connection writes before each write of the job: what still reads at that moment would be refused."""
    job = ask(kind)
    monkeypatch.setattr(job_services, "TELL_SECONDS", -1.0)
    monkeypatch.setattr(imports, "BEAT_SECONDS", -1.0)
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    n_writes = 0

    def write_before(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        nonlocal n_writes
        if not connection.in_atomic_block and not sql.startswith(("SELECT", "PRAGMA", "COMMIT")):
            n_writes += 1
            other.execute(f"PRAGMA user_version = {n_writes}")
        return execute(sql, params, many, context)

    with contextlib.closing(other), connection.execute_wrapper(write_before):
        jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.attempt, job.error) == ("done", 1, "") and n_writes > 2
    RESULTS[kind](job)


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_write_beside_an_open_cursor_is_found(faulty_writes: list[str]) -> None:
    """The witness of the fixture that watches every test, and of the test above."""
    run = stored_run(45)
    other = sqlite3.connect(connection.settings_dict["NAME"])
    for batch in trajectory_batches(run.trajectories.all(), 20):
        Run.objects.filter(pk=run.pk).update(name=f"{len(batch)}")
    assert not faulty_writes
    records = run.trajectories.iterator(20)
    next(records)
    with contextlib.closing(other), other:
        other.execute("PRAGMA user_version = 1")
    with pytest.raises(OperationalError, match="locked"):
        Run.objects.filter(pk=run.pk).update(name="b")
    assert len(faulty_writes) == 1 and faulty_writes.pop().startswith("UPDATE")
    records.close()
    Run.objects.filter(pk=run.pk).update(name="b")


def diagnosed(job: Job) -> None:
    assert job.run is not None and (job.n_done, job.n_total) == (45, 45)


def exported(job: Job) -> None:
    assert job.n_written == 45 and files.size(exports.key_of(job)) == job.bytes_written


def replayed(job: Job) -> None:
    assert job.n_done == 45 and job.report is not None
    assert {line["trajectories"] for line in job.report["strategies"]} == {45}


def imported(job: Job) -> None:
    assert job.run is not None and (job.run.status, job.run.n_trajectories, job.run.n_rejected) == ("done", 6, 0)
    assert sorted(job.run.trajectories.values_list("index", flat=True)) == list(range(6))


def pushed(job: Job) -> None:
    assert job.run is not None and job.run.settings[DIAGNOSED_TO] == job.run.trajectories.order_by("-pk")[0].pk


def moved(job: Job) -> None:
    run = job.run
    assert run is not None and job.n_done == 45 and run.token_segments.count() == 3
    assert not models.StoredStep.objects.filter(segment=None).exists() and run.n_steps > 0
    assert len(list(load_trajectories(list(run.trajectories.all())))) == 45
    delete_run(run)


def rows_made(job: Job) -> None:
    assert job.replay is not None and job.replay.report and job.replay.rows.exists()


def repaired(job: Job) -> None:
    check = job.template_check
    assert check is not None and (check.status, check.error, check.progress) == ("done", "", "")
    assert check.report is not None and check.report["repair"]


def audited(job: Job) -> None:
    assert job.parser_audit is not None and job.parser_audit.report
    assert job.parser_audit.report["readings"] and "not installed" in str(job.parser_audit.report["notes"])


def weighed(job: Job) -> None:
    assert (job.n_done, job.n_total) == (45, 45) and job.report is not None and job.report["trajectories"] == 45


def rescored(job: Job) -> None:
    assert job.run is not None and job.n_done == 45 and job.notes[0] == "45 trajectories are scored."
    column = job.run.scored_columns.get()
    assert column.finished_at is not None and column.scores.count() == column.n_trajectories == 45


def measured(job: Job) -> None:
    assert job.run is not None and job.n_done == 45
    assert job.run.trajectories.filter(damage=0.0).count() == 45  # rows that follow from steps


def gap_read(job: Job) -> None:
    assert job.report is not None and job.report["tokens"] == 64 and job.n_done == 16


def alarm_told(job: Job) -> None:
    assert job.run is not None and models.Alarm.objects.get(run=job.run).delivered_at is not None


RESULTS: dict[str, Callable[[Job], None]] = {
    "diagnose": diagnosed, "export": exported, "replay": replayed, "import": imported, "diagnose_pushed": pushed,
    "replay_trajectory": rows_made, "check_template": repaired, "repair_template": repaired,
    "move_tokens": moved, "audit_parsers": audited, "loss_weights": weighed, "rescore": rescored, "gap": gap_read,
    "deliver_alarms": alarm_told, "damage": measured,
}


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_one_of_a_kind_at_a_time_is_held_by_the_database(kind: str, ask: Ask) -> None:
    job = ask(kind)
    subject = job.run or job.replay or job.template_check or job.parser_audit
    assert subject is not None and ask_job(subject, kind) == (job, False)
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.create(
            run=job.run, replay=job.replay, template_check=job.template_check, parser_audit=job.parser_audit, kind=kind
        )
    with pytest.raises(IntegrityError), transaction.atomic():
        Job.objects.create(kind=kind)  # of nothing
    cancel_job(job)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.attempt) == ("cancelled", 0)


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_a_job_that_kills_its_workers_ends(kind: str, ask: Ask) -> None:
    job = ask(kind)
    Job.objects.filter(pk=job.pk).update(attempt=jobs.MAX_ATTEMPTS)
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "failed" and "workers were lost" in job.error
    if kind == "import":
        assert job.run is not None and (job.run.status, job.run.error) == ("failed", job.error)


@pytest.mark.parametrize("kind", ("import", "replay_trajectory", "audit_parsers"))
def test_a_job_goes_with_its_run(kind: str, ask: Ask) -> None:
    job = ask(kind)
    delete_run(job.run or job.subject.run)  # type: ignore[union-attr]
    assert not Job.objects.exists() and not Replay.objects.exists() and not models.ParserAudit.objects.exists()
    jobs.do_job(job.pk)


def test_a_lost_worker_stores_nothing_more(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was only slow: another worker has the import by now, and has read the file."""
    job = ask("import")
    slow = take_job(job.pk)
    assert slow is not None
    found = imports.diagnosis_for

    def be_taken_over(value: Any, run: Run) -> Any:
        monkeypatch.setattr(imports, "diagnosis_for", found)
        Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
        jobs.do_job(job.pk)
        return found(value, run)

    monkeypatch.setattr(imports, "diagnosis_for", be_taken_over)
    jobs.work_on(slow)
    job.refresh_from_db()
    assert (job.status, job.attempt) == ("done", 2)
    imported(job)


@pytest.mark.django_db(transaction=True)
def test_a_slow_answer_of_a_lost_worker_changes_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ask("replay_trajectory")
    slow = take_job(job.pk)
    assert slow is not None and job.replay is not None
    real = trajectory_replays._replayed

    def be_taken_over(record: models.StoredTrajectory) -> Any:
        monkeypatch.setattr(trajectory_replays, "_replayed", real)
        Job.objects.update(heartbeat_at=timezone.now() - LONG_AGO)
        jobs.do_job(job.pk)
        return real(record)

    monkeypatch.setattr(trajectory_replays, "_replayed", be_taken_over)
    jobs.work_on(slow)
    job.refresh_from_db()
    assert (job.status, job.attempt) == ("done", 2)
    assert len(set(job.replay.rows.values_list("strategy", flat=True))) == job.replay.rows.count() > 0  # type: ignore[union-attr]


def test_an_import_is_cancelled_by_its_run(ask: Ask) -> None:
    job = ask("import")
    assert job.run is not None
    run_actions.cancel(job.run)
    job.refresh_from_db()
    assert (job.run.status, job.status) == ("cancelled", "cancelled")
    other = take_job(ask("import").pk)
    assert other is not None and other.run is not None
    run_actions.cancel(other.run)
    jobs.work_on(other)
    other.refresh_from_db()
    assert (other.status, other.run.status, other.run.n_trajectories) == ("cancelled", "cancelled", 0)


def test_a_push_while_the_worker_is_at_it_is_diagnosed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollouts.jobs import diagnosis

    run = create_run("import", "pushed", status=Run.Status.DONE)
    add_new_trajectories(run, [trajectory("a")])
    job, is_new = ask_job(run, "diagnose_pushed")
    real, names = diagnosis.diagnosis_for, []

    def push_more(value: Any, of: Run) -> Any:
        if not names:
            add_new_trajectories(run, [trajectory("b")])
            assert ask_job(run, "diagnose_pushed")[1] is False  # the worker is at it
        names.append(value.external_id)
        return real(value, of)

    monkeypatch.setattr(diagnosis, "diagnosis_for", push_more)
    jobs.do_job(job.pk)
    assert is_new and names == ["a", "b"] and Job.objects.get().status == "done"


@pytest.mark.django_db(transaction=True)
def test_no_push_is_lost_between_the_last_look_and_the_end() -> None:
    run = create_run("import", "pushed", status=Run.Status.DONE)
    orders: SimpleQueue[int | None] = SimpleQueue()

    def push() -> None:
        try:
            for n in range(15):
                add_new_trajectories(run, [trajectory(f"t{n}")])
                job, is_new = ask_job(run, "diagnose_pushed")
                if is_new:
                    orders.put(job.pk)
        finally:
            orders.put(None)
            connection.close()

    pusher = threading.Thread(target=push)
    pusher.start()
    while (key := orders.get()) is not None:
        jobs.do_job(key)
    pusher.join()
    run.refresh_from_db()
    assert run.trajectories.count() == 15 and not any(is_active(job) for job in run.jobs.all())
    assert run.settings[DIAGNOSED_TO] == run.trajectories.order_by("-pk")[0].pk


def test_the_state_of_a_check_is_that_of_its_job() -> None:
    check, is_new = template_checks.ask(None, register_chat_template(BROKEN))
    assert is_new and (check.status, check.progress) == ("queued", "")
    job = take_job(check.job.pk)
    assert job is not None
    check = TemplateCheck.objects.get()
    assert check.status == "running" and not template_checks.wants_repair(check)
    Job.objects.update(n_done=1, progress="candidate 3 of 9")
    check = TemplateCheck.objects.get()
    assert (check.status, check.error, check.progress) == ("done", "", "candidate 3 of 9")
    end_job(job, Job.Status.FAILED, "It broke off.")
    check = TemplateCheck.objects.get()
    assert (check.status, check.error, check.progress) == ("done", "", "")


@pytest.mark.django_db(transaction=True)
def test_orders_of_retired_tasks_are_dropped(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    job = ask_job(stored_run(2), "diagnose")[0]
    for name in ("import_files", "check_template", "replay_trajectory", "judge_pushed"):
        current_app.send_task(f"rollouts.{name}", (1,))
    worker = celery_worker_process("default", threads=1)
    current_app.send_task("rollouts.do_job", (job.pk,))
    wait_until(lambda: Job.objects.get(pk=job.pk).status == "done", 240, "the job is done")
    assert worker.poll() is None and "unregistered task" in (tmp_path / "worker-0.log").read_text()


# -- the record of a kind ----------------------------------------------------------------------------------------------


def count_words(job: Job, beat: Beat) -> None:
    beat(n_total=2)
    if job.options["of"] == "nothing":
        raise Refusal("There are no words.")
    end_job(job, Job.Status.DONE, n_done=2)


COUNT = JobKind(
    "count_words",
    "Words counted",
    count_words,
    activity="count asked",
    page="run-cost#strategies",
    details=lambda options: f" of {options['of']}",
    done=lambda job: f"{job.n_done} texts were counted.",
    cancelled="Cancelled after {done}; no word is known.",
)


def test_a_new_kind_is_one_record(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker, page, API and audit log know it by its record alone."""
    followed: list[tuple[Run, Any]] = []
    kind = replace(COUNT, follow=lambda run, user: followed.append((run, user)))
    monkeypatch.setitem(JOB_KINDS, kind.slug, kind)
    ada, run = make_member("ada"), stored_run(2)
    client.force_login(ada)
    job, is_new = ask_job(run, kind.slug, {"of": "replies"}, ada)
    event = models.AuditEvent.objects.get()
    assert is_new and (event.action, event.detail) == ("count asked", f"{run.name}: job {job.code}, of replies")
    assert "count asked" in client.get("/audit.json").json()["actions"]
    (line,) = client.get(f"/runs/{run.code}.json").json()["jobs"]
    assert (line["what"], line["sentence"]) == ("Words counted of replies", "It waits for a worker.")
    jobs.do_job(job.pk)
    assert followed == [(run, ada)]
    (line,) = client.get(f"/runs/{run.code}.json").json()["jobs"]
    assert (line["status"], line["sentence"]) == ("done", "2 texts were counted.")
    work = client.get(f"/runs/{run.code}").content.decode()
    assert "Words counted of replies" in work and "2 texts were counted." in work
    value = client.get(f"/api/v1/jobs/{job.code}").json()
    assert (value["what"], value["sentence"]) == ("Words counted of replies", "2 texts were counted.")
    answer = client.post(f"/runs/{run.code}/jobs/{ask_job(run, kind.slug, {'of': 'turns'}, ada)[0].code}/cancel")
    assert answer["Location"] == f"/runs/{run.code}/cost#strategies"
    newest, _ = client.get(f"/runs/{run.code}.json").json()["jobs"]
    assert newest["sentence"] == "Cancelled after 0 trajectories; no word is known."


def test_the_record_says_how_a_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(1)
    monkeypatch.setitem(JOB_KINDS, COUNT.slug, COUNT)
    job, _ = ask_job(run, COUNT.slug, {"of": "nothing"})
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, job.error) == ("failed", "There are no words.")
    sentences: list[str] = []
    change_kind(monkeypatch, COUNT.slug, fail=lambda job, sentence, _: sentences.append(sentence))
    job, _ = ask_job(run, COUNT.slug, {"of": "nothing"})
    jobs.do_job(job.pk)
    job.refresh_from_db()
    assert (job.status, sentences) == ("running", ["There are no words."])


def test_the_record_says_whose_worker_does_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run, options = stored_run(1), {"of": "replies", "model": "words"}
    monkeypatch.setitem(JOB_KINDS, COUNT.slug, COUNT)
    job, _ = ask_job(run, COUNT.slug, options)
    assert queue_of(job) is None and take_next_job(2) == job
    Job.objects.all().delete()
    change_kind(monkeypatch, COUNT.slug, of_engine=True)
    job, _ = ask_job(run, COUNT.slug, options)
    assert queue_of(job) == "engine.words" and take_next_job(2) is None and take_engine_job(job.pk) == job


def test_only_a_listed_kind_is_on_the_page_of_the_run(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.force_login(make_member("ada"))
    run = stored_run(1)
    monkeypatch.setitem(JOB_KINDS, COUNT.slug, replace(COUNT, done=None))
    job, _ = ask_job(run, COUNT.slug, {"of": "replies"})
    assert client.get(f"/runs/{run.code}.json").json()["jobs"] == []
    assert client.get(f"/api/v1/jobs/{job.code}").json()["sentence"] == ""


def test_a_job_of_a_kind_that_is_not_known_fails(client: Client) -> None:
    """A newer version asked for it, and an older one is back."""
    client.force_login(make_member("ada"))
    run = stored_run(1)
    job = Job.objects.create(run=run, kind="of_tomorrow")
    jobs.do_job(job.pk)
    value = client.get(f"/api/v1/jobs/{job.code}").json()
    assert (value["status"], value["what"]) == ("failed", "of_tomorrow") and "of_tomorrow" in value["error"]
    with pytest.raises(KeyError):
        ask_job(run, "of_tomorrow")


def test_what_is_stored_of_a_kind_fits_its_columns() -> None:
    assert all(slug == kind.slug and len(slug) <= 20 for slug, kind in JOB_KINDS.items())
    assert all(len(kind.activity) <= 40 and kind.title for kind in JOB_KINDS.values())
    assert set(JOB_KINDS) == set(DEATHS) == set(RESULTS)
