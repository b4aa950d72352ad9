"""Large jobs: cut into shards, which any workers do in any order, with the result of one worker."""

import io
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from rollout_inspector.formats.writers.exports import EXPORTS
from rollout_inspector.refusal import Refusal
from rollouts.jobs import diagnosis, run_actions, run_parts
from rollouts.jobs.exports import exports
from rollouts.jobs.imports import import_shards, imports
from rollouts.jobs.replays import run_replays
from rollouts.store import files, models
from rollouts.store.jobs.job_queue import must_yield, take_next_job
from rollouts.store.jobs.jobs import JOB_KINDS, Beat, adopt_jobs, ask_job, cancel_job, take_job
from rollouts.store.jobs.shards import release_shard
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker import jobs
from tests.samples.deaths import die_after
from tests.samples.formats import GYM, changed, jsonl
from tests.samples.shard_work import do_all, share_by, waiting
from tests.storage.build import chain
from tests.web.samples import finding, stored_run, trajectory
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

LONG_AGO = timedelta(minutes=10)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    monkeypatch.setattr(run_parts, "PART_TRAJECTORIES", 2)
    monkeypatch.setattr(jobs, "TELL_SECONDS", -1.0)


def asked(n: int = 9, kind: str = "diagnose", user: User | None = None) -> Job:
    run = stored_run(n, findings=[[finding()]] * n)
    return ask_job(run, kind, user=user)[0]


def cut(job: Job) -> list[Job]:
    """Let a worker cut the job."""
    taken = take_job(job.pk)
    assert taken is not None
    jobs.work_on(taken, share=True)
    return list(job.shards.order_by("pk"))


def state(run: Run) -> list[Any]:
    """What a diagnosis writes."""
    run = Run.objects.get(pk=run.pk)
    columns = ("index", "n_findings", "worst_severity", "n_lost", "checks")
    kept = ("trajectory__index", "step_index", "kind", "start", "stop", "version")
    return [
        run.finding_counts, run.diagnosis_version, list(run.trajectories.order_by("index").values_list(*columns)),
        list(run.findings.order_by("trajectory__index", "step_index", "start").values_list(*kept)),
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_diagnosis_in_shards_is_the_diagnosis_of_one_worker(seed: int) -> None:
    one, many = asked(), asked()
    taken = take_job(one.pk)
    assert taken is not None
    jobs.work_on(taken)  # a command does it alone
    assert not one.shards.exists()
    assert len(cut(many)) == 5 and Job.objects.get(pk=many.pk).progress == "0 of 5 parts"
    do_all(random.Random(seed))
    one.refresh_from_db()
    many.refresh_from_db()
    assert (many.status, many.n_done, many.n_total, many.progress) == ("done", 9, 9, "")
    assert (one.status, one.n_done) == ("done", 9) and not Job.objects.exclude(whole=None).exists()
    assert one.run is not None and many.run is not None and state(one.run) == state(many.run)


def test_a_small_job_stays_one_task() -> None:
    job = asked(3)
    assert cut(job) == [] and Job.objects.get(pk=job.pk).status == "done"


def test_a_replay_in_shards_has_the_figures_of_one_worker(tiny_tokenizer: Path) -> None:
    maker = Maker(tiny_tokenizer)
    run = maker.run([maker.conversation(f"t{n}") for n in range(5)])
    without = models.StoredStep.objects.filter(trajectory__index__in=(1, 4))
    without.update(messages_new=None, messages_shared=0)  # some strategies refuse these
    alone, _ = ask_job(run, "replay")
    taken = take_job(alone.pk)
    assert taken is not None
    jobs.work_on(taken)
    job, _ = ask_job(run, "replay")
    assert len(cut(job)) == 3
    do_all(random.Random(3))
    alone.refresh_from_db()
    job.refresh_from_db()
    assert job.status == "done" and job.report == alone.report and job.n_done == 5
    assert any(line["refused"] for line in job.report["strategies"])


def test_the_sentences_of_a_replay_do_not_depend_on_the_order() -> None:
    why = {"c": 1, "b": 2, "a": 2, "d": 1}
    assert (
        run_replays._most_frequent(why)
        == run_replays._most_frequent(dict(reversed(why.items())))
        == {"a": 2, "b": 2, "c": 1}
    )


def test_a_lost_worker_costs_what_it_had_not_stored_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "BATCH", 1)
    job = asked()
    first = cut(job)[0]
    lost = take_job(first.pk)
    assert lost is not None
    seen: list[int] = []

    class Killed(BaseException):
        """Not caught by anybody, as a kill is not."""

    def die(held: Job) -> None:
        if held.n_done == 1:
            raise Killed

    with pytest.raises(Killed):
        diagnosis.do_shard(lost, Beat(lost, die))
    Job.objects.filter(pk=first.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
    assert [one.pk for one in adopt_jobs()] == [first.pk]  # the whole job is not lost
    real = diagnosis._diagnose
    monkeypatch.setattr(
        diagnosis, "_diagnose", lambda run, batch: (seen.extend(r.index for r in batch), real(run, batch))
    )
    do_all(random.Random(1))
    job.refresh_from_db()
    assert sorted(seen) == list(range(1, 9)) and (job.status, job.n_done) == ("done", 9)


def test_a_shard_twice_is_a_shard_once() -> None:
    job = asked()
    shard = cut(job)[0]
    taken = take_job(shard.pk)
    assert taken is not None and take_job(shard.pk) is None
    jobs.work_on(taken, share=True)
    jobs.work_on(taken, share=True)  # a late second worker of the same try
    jobs.do_job(shard.pk)
    assert Job.objects.get(pk=shard.pk).attempt == 1 and Job.objects.get(pk=job.pk).status == "running"


def test_a_job_whose_shards_are_under_way_lives_as_long_as_workers_do() -> None:
    job = asked()
    cut(job)
    Job.objects.filter(pk=job.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
    assert take_next_job(2).pk != job.pk  # type: ignore[union-attr]
    assert adopt_jobs() == [] and Job.objects.get(pk=job.pk).heartbeat_at > timezone.now() - timedelta(seconds=5)


def test_a_shard_that_fails_ends_the_job_with_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    job = asked()
    cut(job)

    def fail(*_: Any) -> None:
        raise Refusal("It cannot be done.")

    monkeypatch.setattr(diagnosis, "diagnose_run", fail)
    do_all(random.Random(1))
    job.refresh_from_db()
    assert (job.status, job.error, job.shards.count()) == ("failed", "It cannot be done.", 0)


def test_a_shard_has_the_tries_of_a_job() -> None:
    job = asked()
    shard = cut(job)[0]
    Job.objects.filter(pk=shard.pk).update(attempt=jobs.MAX_ATTEMPTS)
    do_all(random.Random(1))
    job.refresh_from_db()
    assert job.status == "failed" and "workers were lost" in job.error


def test_cancel_reaches_every_shard() -> None:
    job = asked()
    shards = cut(job)
    taken = take_job(shards[0].pk)
    assert taken is not None
    cancel_job(job)
    assert job.status == "cancelled" and not waiting()
    jobs.work_on(taken, share=True)
    job.refresh_from_db()
    assert job.status == "cancelled" and not job.shards.exists()


def test_shards_go_with_their_run() -> None:
    job = asked()
    shards = cut(job)
    taken = take_job(shards[0].pk)
    assert taken is not None and job.run is not None
    run_actions.delete(job.run)
    jobs.work_on(taken, share=True)
    assert not Job.objects.exists() and not models.StoredFinding.objects.exists()


def exported(run: Run, share: bool, **options: Any) -> Job:
    job, is_new = ask_job(run, "export", options)
    taken = take_job(job.pk)
    assert is_new and taken is not None
    jobs.work_on(taken, share=share)
    assert job.shards.exists() is share
    do_all(random.Random(7))
    job.refresh_from_db()
    return job


def content(job: Job) -> bytes:
    with files.open_file(exports.key_of(job)) as file:
        return file.read()


@pytest.mark.parametrize("name", ["own_jsonl", "verl", "nemo_message_log", "sft", "prime_rl", "tinker"])
def test_an_export_in_shards_has_the_bytes_of_one_task(name: str) -> None:
    run = stored_run(9)
    alone, shared = (exported(run, share, format=name, force=True) for share in (False, True))
    assert content(alone) == content(shared) and (shared.status, shared.n_done) == ("done", 9)
    assert (shared.n_written, shared.bytes_written) == (alone.n_written, len(content(alone)))
    assert len(list(files.listed(exports.prefix_of(shared.code)))) == 1  # the parts are gone


def test_a_parquet_export_in_shards_has_the_rows_of_one_task() -> None:
    run = stored_run(9)
    alone, shared = (exported(run, share, format="own_parquet") for share in (False, True))
    tables = [pyarrow.parquet.read_table(io.BytesIO(content(job))) for job in (alone, shared)]
    assert tables[0].equals(tables[1]) and shared.n_written == alone.n_written == 9


def test_one_object_of_lists_is_written_by_one_worker() -> None:
    assert not EXPORTS["skyrl"].join and exported(stored_run(9), False, format="skyrl", force=True).n_written


def test_what_is_left_out_is_told_as_by_one_task() -> None:
    run = create_run("import", "r")
    values = [trajectory(f"t{n}") if n in (1, 2, 6) else chain(f"t{n}", hostile="") for n in range(9)]
    save_trajectories(run, values, [[]] * 9)
    alone, shared = (exported(run, share, format="verl", leave_out=True) for share in (False, True))
    assert shared.notes == alone.notes and content(alone) == content(shared)
    assert len(alone.notes) == 4 and alone.notes[0] == "3 of 9 trajectories were left out."
    one, refused = (exported(run, share, format="verl") for share in (False, True))
    assert (refused.status, one.status) == ("failed", "failed") and "cannot be exported as verl" in refused.error


# -- killed workers ----------------------------------------------------------------------------------------------------


def large(kind: str, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job with several shards."""
    if kind != "import":
        return ask_job(stored_run(9, findings=[[]] * 9), kind, {})[0]
    monkeypatch.setattr(import_shards, "PART_BYTES", 3000)
    lines = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(9)])
    run = create_run(Run.Kind.IMPORT, "files")
    imports.send_import(run, imports.ask_for_uploads(run, [SimpleUploadedFile("a.jsonl", lines)], "auto", True))
    return run.jobs.get()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", [slug for slug, kind in JOB_KINDS.items() if kind.sharing])
def test_a_worker_that_is_killed_costs_its_shard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of one process in the middle of its shard."""
    job = large(kind, monkeypatch)
    shard = cut(job)[1]
    die_after(2, lambda: jobs.do_job(shard.pk))
    killed = Job.objects.get(status="running", whole=job)
    Job.objects.filter(pk=killed.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
    assert [one.pk for one in adopt_jobs()] == [killed.pk]
    do_all(random.Random(1))
    job.refresh_from_db()
    assert (job.status, job.error) == ("done", "") and not job.shards.exists()
    run = Run.objects.get(pk=job.run_id)
    assert run.n_trajectories == 9 == run.trajectories.count()
    assert list(run.trajectories.order_by("index").values_list("index", flat=True)) == list(range(9))
    assert kind == "import" or job.n_done == 9
    if kind == "replay":
        assert job.report is not None and {line["trajectories"] for line in job.report["strategies"]} == {9}
    if kind == "export":
        assert len(content(job).splitlines()) == 9 == job.n_written


# -- fairness ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def user(db: None) -> Callable[[str], User]:
    return lambda name: User.objects.get_or_create(username=name)[0]


def take(n: int) -> list[Job]:
    return [job for job in (take_next_job(2) for _ in range(n)) if job is not None]


def test_the_shards_of_one_job_take_every_worker_that_nobody_needs(user: Callable[[str], User]) -> None:
    cut(asked(user=user("mallory")))
    assert len(take(6)) == 5


def test_a_free_worker_takes_the_job_of_another_user_first(user: Callable[[str], User]) -> None:
    cut(asked(user=user("mallory")))
    take(2)
    wanted = asked(2, user=user("alice"))
    assert [job.pk for job in take(1)] == [wanted.pk]


def test_other_kinds_of_work_of_the_same_user_come_before_its_shards(user: Callable[[str], User]) -> None:
    cut(asked(user=user("mallory")))
    take(2)
    wanted = asked(2, "replay", user=user("mallory"))
    assert [job.pk for job in take(1)] == [wanted.pk]


def test_shards_beyond_the_limit_yield_to_a_job_that_waits(user: Callable[[str], User]) -> None:
    """Nobody waits for the shards of another user, although these hold every worker."""
    cut(asked(user=user("mallory")))
    held = take(4)
    assert not any(must_yield(shard, 2) for shard in held)
    wanted = asked(2, user=user("alice"))
    assert [shard for shard in held if must_yield(shard, 2)] == held[-1:]  # the newest, which has the least to lose
    assert release_shard(held[-1]) and not release_shard(held[-1])
    assert [job.pk for job in take(1)] == [wanted.pk]
    assert not any(must_yield(shard, 2) for shard in held[:-1])  # nobody waits any more
    again = take(1)
    assert [(job.pk, job.attempt) for job in again] == [(held[-1].pk, 1)]  # the try did not count


def test_a_user_keeps_as_many_workers_as_the_limit_says(user: Callable[[str], User]) -> None:
    cut(asked(user=user("mallory")))
    held = take(2)
    asked(2, user=user("alice"))
    assert not any(must_yield(shard, 2) for shard in held)


def test_a_worker_that_yields_leaves_its_shard_to_the_next(
    user: Callable[[str], User], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "BATCH", 1)
    job = asked(user=user("mallory"))
    cut(job)
    held = take(3)
    wanted = asked(2, user=user("alice"))
    jobs.work_on(held[-1], share=True)
    held[-1].refresh_from_db()
    assert (held[-1].status, held[-1].attempt) == ("queued", 0)
    assert [one.pk for one in take(1)] == [wanted.pk]
    Job.objects.filter(pk__in=[one.pk for one in held]).update(status="queued")
    do_all(random.Random(2))
    assert Job.objects.get(pk=job.pk).n_done == 9 and Job.objects.get(pk=job.pk).status == "done"


def test_a_shard_is_free_when_its_worker_has_left_it(
    user: Callable[[str], User], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker begins with the same attempt, so what the last one clears up may not be the next one's."""
    seen = []

    def do(shard: Job, beat: Beat) -> dict[str, Any]:
        try:
            for _ in range(100):
                beat()
        finally:
            seen.append(Job.objects.get(pk=shard.pk).status)
        return {}

    share_by(monkeypatch, "diagnose", do)
    cut(asked(user=user("mallory")))
    held = take(3)
    asked(2, user=user("alice"))
    jobs.work_on(held[-1], share=True)
    assert seen == ["running"] and Job.objects.get(pk=held[-1].pk).status == "queued"


def test_a_slow_worker_leaves_the_parts_to_the_one_that_joins_now(monkeypatch: pytest.MonkeyPatch) -> None:
    job, run = asked(kind="export"), Run.objects.get()
    parts = [exports.part_of(shard) for shard in cut(job)]
    while keys := [key for key in waiting() if key != job.pk]:
        taken = take_job(keys[0])
        assert taken is not None
        jobs.work_on(taken, share=True)
    slow = take_job(job.pk)
    assert slow is not None
    real, next_worker = files.put, list[Job | None]()

    def be_taken_over(key: str, *arguments: Any, **more: Any) -> None:
        real(key, *arguments, **more)
        Job.objects.filter(pk=job.pk).update(heartbeat_at=timezone.now() - LONG_AGO)
        monkeypatch.setattr(files, "put", real)
        assert [one.pk for one in adopt_jobs()] == [job.pk]
        next_worker.append(take_job(job.pk))

    monkeypatch.setattr(files, "put", be_taken_over)
    jobs.work_on(slow, share=True)
    assert all(map(files.exists, parts)) and next_worker[0] is not None
    jobs.work_on(next_worker[0], share=True)
    assert Job.objects.get(pk=job.pk).status == "done" and not any(map(files.exists, parts)) and run.n_trajectories
