"""Two who write the same rows of PostgreSQL at once: neither fails, and nothing is lost or left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from rollouts.jobs import diagnosis
from rollouts.store import models
from rollouts.store.jobs.jobs import Beat, ask_job, take_job
from rollouts.store.runs import imports
from rollouts.store.runs.runs import create_run, delete_run, delete_trajectories
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.conftest import wait_until
from tests.storage.build import assert_same, chain

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only]


class Others:
    """Work on connections of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(4)

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return work()
            finally:
                connection.close()

        return self._pool.submit(run)

    def transaction(self, work: Callable[[], Any]) -> Transaction:
        return Transaction(self, work)

    def close(self) -> None:
        self._pool.shutdown()


class Transaction:
    """Work that is done and not committed, until :meth:`commit` or :meth:`undo`."""

    def __init__(self, others: Others, work: Callable[[], Any]) -> None:
        self._is_done, self._may_end, self._undoes = threading.Event(), threading.Event(), False

        def run() -> None:
            with transaction.atomic():
                work()
                self._is_done.set()
                assert self._may_end.wait(240)
                transaction.set_rollback(self._undoes)

        self._future = others.begin(run)
        assert self._is_done.wait(240), self._future.exception(0)

    def commit(self) -> None:
        self._may_end.set()
        self._future.result(240)

    def undo(self) -> None:
        self._undoes = True
        self.commit()


@pytest.fixture
def others() -> Any:
    found = Others()
    yield found
    found.close()


def ends_or_waits(work: Future[Any]) -> None:
    """Returns when the work has ended, or a connection waits for a lock."""

    def is_so() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction sees one state of all connections
            cursor.execute(
                "SELECT count(DISTINCT pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND wait_event_type = 'Lock'"
            )
            return work.done() or cursor.fetchone()[0] > 0

    wait_until(is_so, 240, "the work ends or waits")


def a_run(name: str, *external_ids: str) -> models.Run:
    run = create_run(models.Run.Kind.IMPORT, name)
    save_trajectories(run, [chain(one) for one in external_ids])
    return run


# -- bodies that one run stores while another one that holds them is deleted


def test_a_deletion_leaves_what_a_writer_has_found(others: Others) -> None:
    leaving, kept = a_run("leaving", "a"), a_run("kept")
    writer = others.transaction(lambda: save_trajectories(kept, [chain("b")]))
    deletion = others.begin(lambda: delete_run(leaving))
    ends_or_waits(deletion)
    writer.commit()
    deletion.result(240)
    assert not models.Run.objects.filter(pk=leaving.pk).exists()
    assert_same(load_trajectory(kept.trajectories.get()), chain("b"))


def test_what_a_writer_has_found_goes_if_it_stores_nothing(others: Others) -> None:
    leaving, kept = a_run("leaving", "a"), a_run("kept")
    writer = others.transaction(lambda: save_trajectories(kept, [chain("b")]))
    deletion = others.begin(lambda: delete_run(leaving))
    ends_or_waits(deletion)
    writer.undo()
    deletion.result(240)
    assert not models.Content.objects.exists()


def test_a_writer_stores_again_what_is_being_deleted(others: Others) -> None:
    leaving, kept = a_run("leaving", "a"), a_run("kept")
    deletion = others.transaction(lambda: delete_trajectories(list(leaving.trajectories.values_list("pk", flat=True))))
    writer = others.begin(lambda: save_trajectories(kept, [chain("b")]))
    ends_or_waits(writer)
    deletion.commit()
    writer.result(240)
    assert_same(load_trajectory(kept.trajectories.get()), chain("b"))


def test_the_last_of_two_deletions_leaves_nothing(others: Others) -> None:
    runs = a_run("one", "a"), a_run("other", "b")
    keys = [list(run.trajectories.values_list("pk", flat=True)) for run in runs]
    first = others.transaction(lambda: delete_trajectories(keys[0]))
    second = others.begin(lambda: delete_trajectories(keys[1]))
    ends_or_waits(second)
    first.commit()
    second.result(240)
    assert not models.StoredStep.objects.exists() and not models.Content.objects.exists()


# -- a job that ends while somebody asks for it


@pytest.fixture
def asked_again(others: Others, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Future[Any]]]:
    """`asked_again(module, run, kind, options, before)`: while `module` ends a job, a person or a push asks for one."""

    def patch(module: Any, run: models.Run, kind: str, options: dict[str, Any], before: bool) -> list[Future[Any]]:
        real, asked = module.end_job, list[Future[Any]]()

        def ask() -> None:
            asked.append(others.begin(lambda: ask_job(run, kind, options)))
            ends_or_waits(asked[0])

        def end_job(*values: Any) -> Any:
            if before:
                ask()
            ended = real(*values)
            if not before:
                ask()
            return ended

        monkeypatch.setattr(module, "end_job", end_job)
        return asked

    return patch


def test_an_import_that_ends_and_is_asked_for_again(asked_again: Callable[..., list[Future[Any]]]) -> None:
    run = a_run("asked twice")
    job = take_job(ask_job(run, "import", {"files": ["a"]})[0].pk)
    assert job is not None
    models.Job.objects.filter(pk=job.pk).update(heartbeat_at=timezone.now() - timedelta(hours=1))
    asked = asked_again(imports, run, "import", {"files": ["b"]}, before=False)
    imports.end_import(run, job, models.Run.Status.DONE)
    new, is_new = asked[0].result(240)
    assert (is_new, new.options) == (True, {"files": ["b"]})
    job.refresh_from_db()
    assert (job.status, models.Run.objects.get(pk=run.pk).status) == ("done", "done")


def test_a_diagnosis_that_ends_and_is_asked_for_by_a_push(asked_again: Callable[..., list[Future[Any]]]) -> None:
    run = a_run("pushed", "a")
    kind = "diagnose_pushed"
    job = take_job(ask_job(run, kind)[0].pk)
    assert job is not None
    asked = asked_again(diagnosis, run, kind, {}, before=True)
    diagnosis.do_pushed_job(job, Beat(job))
    new, is_new = asked[0].result(240)
    assert is_new and new.pk != job.pk
