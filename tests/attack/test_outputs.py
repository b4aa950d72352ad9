"""What leaves the program: no text of a file commands the runner of a CI, and no link beside a file is followed."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from rollout_inspector.commands.main import main
from rollout_inspector.guard.text_files import write_whole
from rollout_inspector.outputs import line_of, plain, whole_file
from rollouts.jobs.storage.unused_files import JOB_AGE, sweep
from rollouts.store.jobs.jobs import old_jobs
from rollouts.store.models import Job, Role, Run
from rollouts.store.runs.runs import create_run
from tests.conftest import ROOT
from tests.people import make_member

COMMANDS = (
    "##[stop-commands]x", "a ##[add-mask]b", "###[error]c", "##vso[task.setvariable variable=a]b", "##teamcity[x]",
    "::stop-commands::x", "  ::add-mask::b", "\t::error::c", "a\n::set-output name=b::c", "a\r::debug::b",
    "a\r\n##[group]b",
    "\x1b]0;owned\x07", "\x9b2J", "a\u202eb", "\u2066a\u2069", "a\u2028::error::b", "\u200b::error::c", "\U000e0041",
)
HEALTHY = ("## Heading", "a::b", "std::vector", "C##", "x ## [y]", "é ü 漢字 😀", "a: :b", "##a b[0]")


def harmless(text: str) -> bool:
    """Whether no runner finds a command in it (actions/runner, ActionCommand.cs), and no terminal obeys it."""
    lines = re.split("[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", text)
    return not (
        re.search(r"##\w*\[", text)
        or any(line.strip().startswith("::") for line in lines)
        or [char for char in text if not char.isprintable() and char not in "\n\t"]
    )


@pytest.mark.parametrize("text", COMMANDS)
def test_no_text_commands_the_runner_of_a_ci(text: str) -> None:
    assert not harmless(text) and harmless(plain(text)) and harmless(line_of(text))
    assert plain(plain(text)) == plain(text)
    value = json.dumps({"a": text}, ensure_ascii=False)
    assert json.loads(plain(json.dumps({"a": text}))) == {"a": text} and not re.search(r"##\w*\[", plain(value))


@pytest.mark.parametrize("text", HEALTHY)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert plain(text) == line_of(text) == text


def hostile(folder: Path) -> Path:
    """A file whose names and texts are commands of runners, under such a name. One has a finding."""
    lines = (ROOT / "rollouts/gallery/trajectories.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[:8]]
    for n, record in enumerate(records):
        record["external_id"] = f"{COMMANDS[n]} {n}"
    broken = {"format": "rollout-inspector", "version": 1, "external_id": COMMANDS[0]}
    broken["steps"] = [{COMMANDS[1]: COMMANDS[3]}]
    path = folder / "##[stop-commands]a.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in [*records, broken]) + "\n" + COMMANDS[0] + "\n")
    return path


@pytest.mark.parametrize("form", ["text", "json", "junit", "sarif", "markdown", "github"])
def test_a_check_of_a_hostile_file(form: str, tmp_path: Path, capsys: Any) -> None:
    path = hostile(tmp_path)
    main(["check", str(path), "--format", form, "--also", f"text={tmp_path / 'report.txt'}"])
    said = capsys.readouterr()
    own = [line for line in said.out.splitlines() if form == "github" and re.match("::(error|warning|notice)", line)]
    rest = said.out if form != "github" else "\n".join(line for line in said.out.splitlines() if line not in own)
    assert harmless(rest) and harmless(said.err) and harmless((tmp_path / "report.txt").read_text())
    assert "stop-commands" in said.out and not any("##[" in line for line in own)


def test_other_commands_with_a_hostile_file(tmp_path: Path, capsys: Any) -> None:
    path = hostile(tmp_path)
    for arguments in (
        ["mend", str(path), "-o", str(tmp_path / "##[x]out.jsonl")], ["mend", "##[x]none", "-o", "y"],
        ["audit", str(path), "--output", str(tmp_path / "##[x]audit")], ["template", "##[x]"], ["check", "##[x]"],
        ["lock", "##[x]"], ["push", "##[x]", "--url", "http://127.0.0.1:9"], ["watch", "##[x]", "--url", "http://127.0.0.1:9"],
        ["check", str(path), "--fail-on", "::error::"],
    ):
        with suppress(SystemExit):
            main(arguments)
        said = capsys.readouterr()
        assert said.out + said.err and harmless(said.out) and harmless(said.err), (arguments, said)


def test_the_pytest_plugin_and_a_hostile_file(tmp_path: Path) -> None:
    hostile(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntito_files = *.jsonl\n")
    command = [sys.executable, "-m", "pytest", "-p", "rollout_inspector.guard.pytest_plugin", "-v"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    said = re.sub("\x1b\\[[0-9;]*m", "", ran.stdout)
    assert ran.returncode == 1 and "stop-commands" in said and harmless(said), said


def test_no_planted_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "report.txt"
    for name in ("report.txt.part", ".report.txt.part", f".report.txt.{os.getpid()}", "report.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_whole(target, b"report", "The report")
    assert target.read_bytes() == b"report" and victim.read_text() == "mine"
    beside = tmp_path / "manifest"
    beside.symlink_to(victim)
    with whole_file(beside) as file:
        file.write(b"a")
    assert beside.read_bytes() == b"a" and not beside.is_symlink() and victim.read_text() == "mine"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), whole_file(target) as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert target.read_bytes() == b"report" and sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.django_db
def test_old_sessions_and_jobs_go_and_the_doctor_counts_them(settings: Any, tmp_path: Path) -> None:
    settings.INSPECTOR_DATA = tmp_path
    now = timezone.now()
    for n, days in enumerate((-1, 1)):
        Session.objects.create(session_key=f"{n}", session_data="", expire_date=now + timedelta(days=days))
    run = create_run(Run.Kind.IMPORT, "a", status=Run.Status.DONE)
    ended = {"run": run, "kind": "diagnose", "status": "done"}
    jobs = [Job.objects.create(finished_at=now - JOB_AGE - timedelta(days=days), **ended) for days in (3, 2, 1)]
    recent = [Job.objects.create(finished_at=now, **ended), Job.objects.create(run=run, kind="diagnose")]
    export = {**ended, "kind": "export", "finished_at": jobs[0].finished_at}
    offered, last = Job.objects.create(**export, expires_at=now + JOB_AGE), Job.objects.create(**export)
    assert {job.pk for job in old_jobs(JOB_AGE)} == {job.pk for job in jobs}
    said = io.StringIO()
    try:
        call_command("doctor", stdout=said)
    except Exception as error:
        assert "harm" in str(error)
    assert "1 expired sessions, 3 old jobs" in said.getvalue()
    sweep()
    assert {job.pk for job in Job.objects.all()} == {job.pk for job in [*recent, offered, last]}
    assert [session.session_key for session in Session.objects.all()] == ["1"]


@pytest.mark.django_db
def test_an_ordinary_refusal_has_no_traceback_in_the_log(caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        client = Client()
        client.force_login(make_member("vic", role=Role.VIEWER))
        assert client.get("/runs/new").status_code == 403
    said = [record for record in caplog.records if record.name == "django.request"]
    assert said and not any(record.exc_info for record in said)
