"""M10: the jobs of one user do not delay the jobs of another one."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.utils import timezone

from rollouts.jobs import template_checks
from rollouts.jobs.broker import send_job
from rollouts.jobs.imports import imports
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.job_queue import take_next_job
from rollouts.store.jobs.jobs import ask_job, end_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run
from rollouts.worker import jobs
from tests.attack.hostile_uploads import FOREVER
from tests.conftest import wait_until
from tests.samples.formats import GYM, changed, jsonl
from tests.samples.shard_work import change_kind


def check_of(user: User, n: int) -> Job:
    """A job that checks a hostile template."""
    template = register_chat_template(f"{FOREVER}{n}")
    return template_checks.ask(None, template, user=user)[0].job


def import_of(user: User, n: int, folder: Path) -> Job:
    file = folder / f"{user.username}-{n}.jsonl"
    file.write_bytes(jsonl(changed(GYM, "_ng_task_index", to=n)))
    return imports.ask(create_run(Run.Kind.IMPORT, file.name, user=user), [file])


@pytest.fixture
def mallory(db: None) -> User:
    return User.objects.create(username="mallory")


@pytest.fixture
def alice(db: None) -> User:
    return User.objects.create(username="alice")


def test_a_user_with_many_checks_leaves_a_place_to_others(mallory: User, alice: User, tmp_path: Path) -> None:
    """M10: a free worker takes the import of another user before the third of twenty checks."""
    checks = [check_of(mallory, n) for n in range(20)]
    wanted = import_of(alice, 0, tmp_path)
    taken = [take_next_job(2), take_next_job(2), take_next_job(2)]
    assert {job.pk for job in taken if job} == {checks[0].pk, wanted.pk, checks[1].pk}
    assert take_next_job(2) is None and Job.objects.filter(status="queued").count() == 18


def test_a_user_with_many_imports_leaves_a_place_to_others(mallory: User, alice: User, tmp_path: Path) -> None:
    """M10: the same with twenty imports and the check of another user."""
    files = [import_of(mallory, n, tmp_path) for n in range(20)]
    assert [job.pk for job in (take_next_job(2), take_next_job(2)) if job] == [files[0].pk, files[1].pk]
    wanted = check_of(alice, 0)
    third = take_next_job(2)
    assert third is not None and third.pk == wanted.pk
    assert take_next_job(2) is None
    end_job(Job.objects.get(pk=files[0].pk), Job.Status.DONE)
    fourth = take_next_job(2)
    assert fourth is not None and fourth.pk == files[2].pk


def test_the_own_import_is_next_after_many_own_checks(mallory: User, tmp_path: Path) -> None:
    """M10: jobs of one user take turns by kind."""
    checks = [check_of(mallory, n) for n in range(5)]
    wanted = import_of(mallory, 0, tmp_path)
    taken = [take_next_job(2), take_next_job(2)]
    assert [job.pk for job in taken if job] == [checks[0].pk, wanted.pk]


def test_a_job_that_had_to_wait_is_sent_for_when_another_ends(
    mallory: User, tmp_path: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10: a task that found nothing to do is not missed later."""
    waiting = [import_of(mallory, n, tmp_path) for n in range(3)]
    change_kind(monkeypatch, "import", handler=lambda job, beat: end_job(job, Job.Status.DONE))
    held = [take_next_job(2), take_next_job(2)]
    jobs.do_job(waiting[2].pk)
    assert sent == [] and Job.objects.get(pk=waiting[2].pk).status == "queued"
    assert held[0] is not None and end_job(held[0], Job.Status.DONE)
    waiting.append(import_of(mallory, 3, tmp_path))
    jobs.do_job(waiting[0].pk)
    assert Job.objects.get(pk=waiting[2].pk).status == "done" and len(sent) == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("n_users", [1, 6])
def test_workers_that_are_free_at_once_keep_the_limit(n_users: int) -> None:
    """M10: six workers take two jobs of one user, and six jobs of six users."""
    users = [User.objects.create(username=f"user{n}") for n in range(n_users)]
    for n in range(6):
        run = create_run(Run.Kind.IMPORT, "run", user=users[n % n_users])
        ask_job(run, "diagnose", user=users[n % n_users])
    start, taken = threading.Barrier(6), []

    def take() -> None:
        start.wait()
        try:
            taken.append(take_next_job(2))
        finally:
            connection.close()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(taken) == 6
    expected = min(6, 2 * n_users)
    assert len({job.pk for job in taken if job}) == expected == Job.objects.filter(status="running").count()


@pytest.mark.django_db(transaction=True)
def test_an_import_passes_twenty_hostile_checks(
    celery_worker_process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """M10: with a real worker that has the places which `manage.py serve` gives it."""
    mallory, alice = User.objects.create(username="mallory"), User.objects.create(username="alice")
    celery_worker_process("default", threads=3, pool="prefork")
    for n in range(20):
        assert not send_job(check_of(mallory, n))
    wait_until(lambda: Job.objects.filter(status="running").count() == 2, 60, "two checks are under way")
    wanted = import_of(alice, 0, tmp_path)
    assert not send_job(wanted)
    wait_until(lambda: Job.objects.get(pk=wanted.pk).status == "done", 120, "the import is done")
    # The first two checks may have ended meanwhile on a slow machine, and the next two have begun.
    assert Job.objects.filter(status="queued").count() >= 16
    Job.objects.filter(status="queued").update(status="cancelled", finished_at=timezone.now())
    Job.objects.filter(status="running").update(cancel_requested=True)
