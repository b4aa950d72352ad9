"""Work that SIGKILL ends in the middle: nothing is half stored, and the second try is like the first."""

import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.utils import timezone

from rollout_inspector.outputs import dead_drafts, remove_dead_drafts
from rollouts.gallery import BUNDLE
from rollouts.jobs import template_checks
from rollouts.store import files
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.jobs.jobs import FOLLOWED_AFTER, JOB_KINDS, adopt_jobs, ask_job, cancel_job
from rollouts.store.models import Job, Run, TemplateCheck
from rollouts.store.runs.runs import create_run
from rollouts.worker import jobs
from tests import faults
from tests.conftest import ROOT
from tests.samples.chat_templates import BROKEN
from tests.samples.training_steps import save, world

SAMPLE = {"index": 1, "tokens": [1, 2, 3], "response_length": 2, "prompt": "a", "response": "b", "reward": 1.0}
LAST = 200
"""No job of this file asks more of the database."""


def is_killed(work: Callable[[], object]) -> bool:
    """Whether SIGKILL ended a process of its own that did some work."""
    connections.close_all()
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(job: Job, n: int) -> bool:
    """Do a job in a process that is killed before its n-th query. False = it ended before."""
    queries = count(1)

    def ask(execute: Callable[..., Any], *arguments: Any) -> Any:
        if next(queries) >= n:
            die()
        return execute(*arguments)

    def work() -> None:
        with connection.execute_wrapper(ask):
            jobs.do_job(job.pk)

    return is_killed(work)


def killed_with_draft(write: Callable[[str], object], folder: Path) -> bool:
    """Write in a process that is killed before it opens or renames a file beside its draft."""

    def work() -> None:
        sys.addaudithook(lambda event, _: die() if event in ("open", "os.rename") and drafts(folder) else None)
        write("a")

    return is_killed(work)


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

    def work() -> None:
        JOB_KINDS["diagnose"] = replace(JOB_KINDS["diagnose"], follow=lambda *_: die())
        jobs.do_job(job.pk)

    assert is_killed(work)
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


def drafts(folder: Path) -> list[Path]:
    return sorted(folder.rglob(".*.part"))


def stopped_while_writing(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """A process that was stopped while it had the drafts of its output open."""
    writing = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        assert writing.poll() is None, "it has ended"
        if drafts(folder):
            writing.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writing.pid, os.WSTOPPED | os.WNOWAIT)
            if (parts := drafts(folder)) and not any(any(dead_drafts(part.parent)) for part in parts):
                return writing
            writing.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("door", ["mend", "audit", "convert_pickle"])
def test_what_a_killed_command_left_goes_with_the_next_one_and_what_a_live_one_writes_stays(
    door: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text(BUNDLE.read_text(encoding="utf-8") * 3)
    library = [sys.executable, "-m", "rollout_inspector"]
    result = out / "out.jsonl"
    if door == "audit":
        command, result = [*library, "audit", str(source), "--output", str(out), "--processes", "1"], out / "audit.json"
    elif door == "mend":
        command = [*library, "mend", str(source), "-o", str(result), "--drop"]
    else:
        dump = tmp_path / "dump.pkl"
        dump.write_bytes(pickle.dumps({"samples": [SAMPLE] * 3}))
        command = [sys.executable, "manage.py", "convert_pickle", str(dump), str(result)]
    if door != "audit":
        out.mkdir()
        result.write_text("before")
    writing = stopped_while_writing(command, out)
    before = drafts(out)
    for draft in before:
        remove_dead_drafts(draft.parent)
    assert drafts(out) == before, "its writer is alive"
    writing.kill()
    assert writing.wait() == -signal.SIGKILL and drafts(out) == before
    assert not result.exists() if door == "audit" else result.read_text() == "before"
    subprocess.run(command, cwd=ROOT, check=door != "audit", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert not drafts(out) and result.exists() and result.read_text() != "before"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("door", ["export", "backup", "export_rollouts"])
def test_what_a_killed_writer_of_the_server_left_is_counted_and_goes_with_the_next_one(
    door: str, tmp_path: Path, settings: Any, sent: list[int]
) -> None:
    settings.INSPECTOR_DATA = tmp_path / "data"
    run = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
    save(run, world())
    scratch = files.scratch_folder()
    if door == "export":
        job = ask_job(run, "export", {"format": "own_jsonl"})[0]
    write: dict[str, Callable[[str], object]] = {
        "export": lambda _: jobs.do_job(job.pk),
        "backup": lambda n: call_command("backup", str(tmp_path / n), stdout=io.StringIO()),
        "export_rollouts": lambda _: call_command(
            "export_rollouts", run.code, output=str(scratch / "out.jsonl"), stdout=io.StringIO()
        ),
    }
    assert killed_with_draft(write[door], scratch)
    assert len(drafts(scratch)) == 1
    said = io.StringIO()
    with suppress(CommandError):  # no worker serves here
        call_command("doctor", stdout=said)
    assert "1 files of dead writers" in said.getvalue()
    if door == "export":
        faults.let_time_pass()
        adopt_jobs()
    write[door]("b")
    assert not drafts(tmp_path)
    if door == "export":
        job.refresh_from_db()
        assert job.status == "done"
