"""Imports in shards that meet each other, a fault, or somebody who looks or stops them in the middle."""

import random
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from rollout_inspector.formats import FileRefused
from rollouts.jobs import run_actions
from rollouts.jobs.imports import import_join, import_shards, imports
from rollouts.store import files
from rollouts.store.jobs.jobs import take_job
from rollouts.store.models import Job, Run, StoredTrajectory, TokenSegment
from rollouts.store.runs.imports import PROVISIONAL
from rollouts.store.runs.runs import recount
from rollouts.store.token_arrays.stores import STORES, folder_of
from rollouts.store.trajectories.save_trajectories import bump_run
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.worker import jobs
from tests.samples.formats import own_line
from tests.samples.import_shards import BIG, FILES, cut, gym, in_one, kill_in_shard, run_of, tables
from tests.samples.shard_work import do_all, share_by, waiting
from tests.storage.build import chain

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small_parts")]


def do_shards(job: Job) -> None:
    """Everything but the join."""
    while keys := [key for key in waiting() if key != job.pk]:
        taken = take_job(keys[0])
        assert taken is not None
        jobs.work_on(taken, share=True)


# -- arrays in segments


@pytest.fixture
def in_segments(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.INSPECTOR_TOKENS = "segments"
    monkeypatch.setattr(STORES["segments"], "min_tokens", 1)


def stored_segments() -> set[str]:
    codes = Run.objects.values_list("code", flat=True)
    return {one.key for code in codes for one in files.listed(folder_of(code))}


def named_segments() -> set[str]:
    return set(TokenSegment.objects.values_list("key", flat=True))


def contents(run: Run) -> list[str]:
    return [repr(one) for one in load_trajectories(list(run.trajectories.order_by("index")))]


@pytest.mark.parametrize("name", ["ids of an earlier file", "an id twice in a file", "our own format", "row groups"])
def test_segments_hold_what_one_task_stores(
    name: str, in_segments: None, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        one = run_of(in_one(FILES[name]).jobs.get(kind="import"))
        job = cut(FILES[name])
        do_all(random.Random(3))
    run = run_of(job)
    assert run.token_segments.count() > 1 and not run.trajectories.filter(steps__tokens__isnull=False).exists()
    assert contents(run) == contents(one)
    assert stored_segments() == named_segments()


def test_the_segments_of_a_lost_worker_and_of_a_refused_file_go(
    in_segments: None, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    with django_capture_on_commit_callbacks(execute=True):
        job = cut([("a.jsonl", gym(*range(20))), ("b.jsonl", gym(*range(15, 40)))])
        shards = list(job.shards.order_by("pk"))
        kill_in_shard(shards[0], 3, monkeypatch)
    lost = stored_segments()
    assert lost and lost == named_segments()
    with django_capture_on_commit_callbacks(execute=True):
        Job.objects.filter(pk=shards[0].pk).update(status="queued")
        real = import_shards._Piece.store

        def refuse(piece: Any, *values: Any) -> None:
            real(piece, *values)
            if piece.source.name == "b.jsonl" and piece.source.line > 12:
                raise FileRefused("b.jsonl is damaged.")

        monkeypatch.setattr(import_shards._Piece, "store", refuse)
        do_all(random.Random(4))
    run = run_of(job)
    assert (run.status, run.n_trajectories, run.n_rejected) == ("done", 20, 1)
    assert stored_segments() == named_segments() and lost.isdisjoint(stored_segments())


def test_two_shards_that_store_one_id_at_once_leave_no_segment_behind(
    in_segments: None, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    files_of = [("a.jsonl", gym(*range(20))), ("b.jsonl", gym(*range(20)))]
    expected = tables(in_one(files_of))["trajectories"]
    real, n = import_shards._Piece._taken, 0

    def not_seen_yet(piece: Any, batch: Any) -> Any:
        nonlocal n
        found = real(piece, batch)
        n += bool(found)
        return {} if found and n % 2 else found

    monkeypatch.setattr(import_shards._Piece, "_taken", not_seen_yet)
    with django_capture_on_commit_callbacks(execute=True):
        job = cut(files_of)
        do_all(random.Random(1))
    assert n > 1 and tables(run_of(job))["trajectories"] == expected
    assert stored_segments() == named_segments()


# -- on PostgreSQL, at once


def in_threads(*functions: Any) -> None:
    failed: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=(one,)) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres_only
def test_two_workers_that_store_the_same_ids_do_not_block_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [f"t{n}" for n in range(300)]
    parts = [("a.jsonl", numbers), ("b.jsonl", numbers[::-1])]
    data = [(name, b"".join(own_line(chain(n, hostile="")) for n in names)) for name, names in parts]
    monkeypatch.setattr(import_shards, "PART_BYTES", len(data[0][1]))
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 500)
    expected = tables(in_one(data))["trajectories"]
    job = cut(data)
    shards = [take_job(key) for key in waiting()]
    assert len(shards) == 2
    together, met = threading.Barrier(2), set[str]()
    real = import_shards._Piece._taken

    def both(piece: Any, batch: Any) -> Any:
        found = real(piece, batch)
        if piece.source.name not in met:
            met.add(piece.source.name)
            together.wait(240)
        return found

    monkeypatch.setattr(import_shards._Piece, "_taken", both)
    in_threads(*[lambda one=one: jobs.work_on(one, share=True) for one in shards])
    assert {(one.status, one.error) for one in job.shards.all()} == {("done", "")}
    do_all(random.Random(1))
    assert tables(run_of(job))["trajectories"] == expected


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres_only
def test_what_is_stored_while_totals_are_counted_again_counts() -> None:
    run = in_one([("a.jsonl", BIG)])
    others: list[threading.Thread] = []

    def add() -> None:
        with transaction.atomic():
            bump_run(Run.objects.get(pk=run.pk), {}, n_trajectories=1)
        connection.close()

    def stored_meanwhile(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("UPDATE") and not others:
            others.append(threading.Thread(target=add))
            others[0].start()
            others[0].join(1)
        return execute(sql, *rest)

    with connection.execute_wrapper(stored_meanwhile):
        recount(run)
    others[0].join()
    assert Run.objects.get(pk=run.pk).n_trajectories == 41


# -- somebody looks, stops it or goes on with it


def test_a_page_that_was_seen_while_parts_were_read_is_not_the_page_afterwards(admin_client: Client) -> None:
    job = cut([("a.jsonl", gym(*range(20))), ("b.jsonl", gym(3))])
    do_shards(job)
    one = StoredTrajectory.objects.get(external_id__endswith=":3-2")
    assert one.index >= PROVISIONAL
    pages = [reverse("trajectory", args=[one.code]), f"/api/v1/trajectories/{one.code}"]
    seen = [admin_client.get(page) for page in pages]
    do_all(random.Random(1))
    for page, before in zip(pages, seen, strict=True):
        after = admin_client.get(page, headers={"If-None-Match": before["ETag"]})
        assert after.status_code == 200 and b"b.jsonl:3-2" in after.content


def test_resume_sends_a_worker_for_every_part_that_is_left(sent: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    job = cut([("a.jsonl", BIG)])
    taken = take_job(job.shards.order_by("pk")[0].pk)
    assert taken is not None
    with monkeypatch.context() as patched:
        share_by(patched, "import", lambda *_: 1 // 0)
        jobs.work_on(taken, share=True)
        do_all(random.Random(1))
    run = run_of(job)
    assert run.status == "failed"
    sent.clear()
    run_actions.resume(run)
    new = run.jobs.get(status="running")
    assert set(new.shards.values_list("pk", flat=True)) <= set(sent) and run_of(job).status == "running"
    run_actions.cancel(run)
    do_all(random.Random(1))
    assert (run_of(job).status, run_of(job).n_trajectories) == ("cancelled", 0)


def test_an_import_whose_parts_cannot_be_put_together_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = FILES["ids of an earlier file"]
    expected = tables(in_one(data))
    job = cut(data)
    with monkeypatch.context() as patched:
        patched.setattr(import_join, "_names", lambda *_: 1 // 0)
        do_all(random.Random(1))
    run = run_of(job)
    assert (run.status, run.n_trajectories, run.n_steps) == ("failed", 0, 0) and "ZeroDivisionError" in run.error
    assert not StoredTrajectory.objects.filter(run=run).exists() and run_actions.can_resume(run)
    run_actions.resume(run)
    do_all(random.Random(2))
    assert tables(run_of(job)) == expected


def test_a_file_cannot_take_the_names_of_a_moment() -> None:
    """An id that another part has waits under another name for the join. A file may hold that very name."""

    def data(third: str) -> list[tuple[str, bytes]]:
        ids = ["x", *[f"t{n}" for n in range(40)], third, "x"]
        return [("a.jsonl", b"".join(own_line(chain(name, hostile="")) for name in ids))]

    job = cut(data("#" * 12))
    do_shards(job)
    (name,) = run_of(job).trajectories.filter(external_id__endswith=":x").values_list("external_id", flat=True)
    do_all(random.Random(1))
    expected = tables(in_one(data(name)))
    job = cut(data(name))
    do_all(random.Random(1))
    assert tables(run_of(job)) == expected


def test_a_worker_that_stops_between_two_steps_of_the_join_changes_nothing_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one puts the parts together while the first one sleeps in the middle."""
    data = FILES["ids of an earlier file"]
    expected = tables(in_one(data))
    job = cut(data)
    do_shards(job)
    slow = take_job(job.pk)
    assert slow is not None
    real, n = import_join._place, 0

    def sleep(*arguments: Any) -> None:
        nonlocal n
        n += 1
        if n == 2:
            Job.objects.filter(pk=job.pk).update(status="queued", heartbeat_at=timezone.now() - timedelta(minutes=10))
            do_all(random.Random(1))
        real(*arguments)

    monkeypatch.setattr(import_join, "_place", sleep)
    jobs.work_on(slow, share=True)
    assert tables(run_of(job)) == expected
