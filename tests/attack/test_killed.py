"""Work that SIGKILL ends in the middle: nothing is half stored, and the second try is like the first."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.utils import timezone

from rollouts.gallery import BUNDLE
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.jobs import FOLLOWED_AFTER, JOB_KINDS, adopt_jobs, ask_job, cancel_job
from rollouts.store.models import Job, Run, TemplateCheck
from rollouts.store.runs.runs import create_run
from rollouts.worker import jobs
from tests import faults
from tests.conftest import ROOT, wait_until
from tests.samples.chat_templates import BROKEN
from tests.samples.training_steps import save, world

LAST = 200
"""No job of this file asks more of the database."""


def killed_at(job: Job, n: int) -> bool:
    """Do a job in a process of its own that SIGKILL ends before its n-th query. False = it ended before."""
    connections.close_all()
    if (child := os.fork()) == 0:
        try:
            n_queries = 0

            def die(execute: Callable[..., Any], *arguments: Any) -> Any:
                nonlocal n_queries
                n_queries += 1
                if n_queries >= n:
                    os.kill(os.getpid(), signal.SIGKILL)
                return execute(*arguments)

            with connection.execute_wrapper(die):
                jobs.do_job(job.pk)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def of_run(kind: str) -> Callable[[], Job]:
    def ask() -> Job:
        run = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
        save(run, world())
        return ask_job(run, kind)[0]

    return ask


def check() -> Job:
    return template_checks.ask(None, register_chat_template(BROKEN), repair=False)[0].job


def repair() -> Job:
    answered = template_checks.ask(None, register_chat_template(BROKEN), repair=False)[0]
    jobs.do_job(answered.job.pk)
    answered.refresh_from_db()
    assert template_checks.ask_for_repair(answered)
    return answered.job


def outcome(job: Job) -> Any:
    """What a job has left: its own answer, what its run holds, and what its check says."""
    run = job.run
    of_run = run and (
        sorted(run.finding_counts.items()), run.findings.count(),
        sorted((found.trajectory.external_id, found.kind) for found in run.findings.select_related("trajectory")),
    )
    answered = TemplateCheck.objects.filter(job=job).first()
    report = {name: value for name, value in (job.report or {}).items() if name != "key"}
    return job.n_done, repr(of_run), answered and (answered.status, repr(answered.report)), sorted(report)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ask", [of_run("gap"), of_run("diagnose"), of_run("replay"), check, repair],
                         ids=["gap", "diagnose", "replay", "check", "repair"])  # fmt: skip
def test_a_job_that_is_killed_at_any_query_ends_like_one_that_is_not(ask: Callable[[], Job], sent: list[int]) -> None:
    whole = ask()
    jobs.do_job(whole.pk)
    whole.refresh_from_db()
    assert whole.status == "done"
    expected, n_killed = outcome(whole), 0
    if whole.run is None:
        TemplateCheck.objects.all().delete()
        Job.objects.all().delete()
    job = ask()
    for n in (3, 6, 10, 16, LAST):
        killed = killed_at(job, n)
        job.refresh_from_db()
        n_killed += killed
        if job.status == "done":
            break
        assert killed and job.status in ("queued", "running"), job.error
        if job.status == "running":
            faults.let_time_pass()
            assert [one.pk for one in adopt_jobs()] == [job.pk]
    assert n_killed >= 2 and (job.status, job.error) == ("done", "")
    assert outcome(job) == expected


@pytest.mark.django_db(transaction=True)
def test_what_follows_a_job_that_was_killed_at_its_end_is_asked_for_once(sent: list[int]) -> None:
    job = of_run("diagnose")()
    connections.close_all()
    if (child := os.fork()) == 0:
        kind = JOB_KINDS["diagnose"]
        JOB_KINDS["diagnose"] = replace(kind, follow=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            jobs.do_job(job.pk)
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    job.refresh_from_db()
    assert job.status == "done" and not Job.objects.filter(kind="gap").exists()
    jobs.ask_for_followers()
    assert not Job.objects.filter(kind="gap").exists(), "its worker may still be at it"
    Job.objects.filter(pk=job.pk).update(finished_at=timezone.now() - 2 * FOLLOWED_AFTER)
    for _ in range(2):
        jobs.ask_for_followers()
        (following,) = Job.objects.filter(kind="gap")
        assert following.pk in sent
        cancel_job(following)  # is not asked for again


def test_mend_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(BUNDLE.read_text(encoding="utf-8") * 8)
    output.write_text("before")
    command = [sys.executable, "-m", "rollout_inspector", "mend", str(source), "-o", str(output), "--drop"]
    for draft in (".out.jsonl.*.part", ".out.jsonl.manifest.json.*.part"):
        mending = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        wait_until(lambda draft=draft: any(tmp_path.glob(draft)), 120, "it writes")  # type: ignore[misc]
        mending.kill()
        assert mending.wait() == -signal.SIGKILL and output.read_text() == "before"
        assert not (tmp_path / "out.jsonl.manifest.json").exists()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert output.read_text() != "before"
