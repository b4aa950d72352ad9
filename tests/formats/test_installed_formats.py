"""Formats that other packages bring: read by `check`, an import and a push, and none of their faults is a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

MODULE = """
from dataclasses import replace
from rollout_inspector.formats.registry import having, line_format
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array

def trajectory_of(value, number):
    return Trajectory(value["who"], (Step(ids_array(value["read"]), ids_array(value["wrote"])),))

def no_detect(values):
    return values[0]["what"] / 2

def no_read(source):
    yield trajectory_of({"who": "first", "read": [1], "wrote": [2]}, 1)
    raise RuntimeError("the disk of my\\nlibrary is gone")

def no_trajectories(source):
    yield "a text"

def no_cut(source, size):
    raise ValueError("I cannot cut")

FORMAT = line_format("ours_not", "of the test", having("who"), trajectory_of)
TAKEN = line_format("own_jsonl", "a name that is taken", having("who"), trajectory_of)
NO_FORMAT = 7
NO_DETECT = replace(FORMAT, name="no_detect", detect=no_detect)
NO_READ = replace(FORMAT, name="no_read", detect=having("no_read"), read=no_read)
NO_ITEMS = replace(FORMAT, name="no_items", detect=having("no_items"), read=no_trajectories)
NO_CUT = replace(FORMAT, name="no_cut", detect=having("no_cut", "who"), cut=no_cut)
"""
ENTRIES = """
[rollout_inspector.formats]
a = fake_trainer:FORMAT
b = fake_trainer:TAKEN
c = fake_trainer:NO_FORMAT
d = fake_trainer:MISSING
A = fake_trainer:NO_DETECT
f = fake_trainer:NO_READ
g = fake_trainer:NO_ITEMS
h = fake_trainer:NO_CUT
"""
GOOD = {"who": "x", "read": [1, 2], "wrote": [3]}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed package, for the search path of Python."""
    info = tmp_path / "site" / "fake_trainer-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "fake_trainer.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-trainer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return info.parent


def run(package: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(package), **environment}, check=False,
    )


def lines(folder: Path, *values: dict[str, Any]) -> str:
    file = folder / "rollouts.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(file)


def test_check_reads_a_format_of_another_package_and_its_faults_stop_nothing(package: Path, tmp_path: Path) -> None:
    ended = run(package, "-m", "rollout_inspector.commands", "check", lines(tmp_path, GOOD), "--format", "json")
    report = json.loads(ended.stdout)
    assert report["trajectories"] == 1 and report["formats"] == ["ours_not"], report
    assert "fake_trainer:NO_FORMAT, which is no Format" in ended.stderr
    assert "The format d cannot be loaded from fake_trainer:MISSING" in ended.stderr
    assert "The format no_detect, of another package, failed: KeyError: 'what'" in ended.stderr


@pytest.mark.parametrize(
    ("field", "words"),
    [("no_read", "The format no_read, of another package, failed: RuntimeError"),
     ("no_items", "it yields str, which is no Trajectory")],
)
def test_a_reader_that_fails_is_a_sentence(package: Path, tmp_path: Path, field: str, words: str) -> None:
    ended = run(package, "-m", "rollout_inspector.commands", "check", lines(tmp_path, {field: 1}))
    assert ended.returncode == 2 and words in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


DOORS = """
import sys
import django
django.setup()
from django.core.management import call_command
from django.test import Client
from rollout_inspector.formats import FORMATS, Source
from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.runs.runs import create_run
from tests.people import make_member

call_command("migrate", verbosity=0)
call_command("import_rollouts", sys.argv[1], "--run", "imported")
token = create_api_key(make_member("ann"), "trainer")[1]
run = create_run(Run.Kind.IMPORT, "pushed", status=Run.Status.DONE)
pushed = Client().post(
    f"/api/runs/{run.code}/trajectories", open(sys.argv[1], "rb").read(), content_type="application/x-ndjson",
    HTTP_AUTHORIZATION="Bearer " + token, HTTP_HOST="127.0.0.1",
)
assert pushed.status_code == 200, pushed.content
for run in Run.objects.order_by("pk"):
    print(run.name, run.n_finished, [one.external_id for one in run.trajectories.all()])
assert FORMATS["no_cut"].cut(Source.of_bytes(b"{}"), 10) == []
"""


@pytest.mark.sqlite_only
def test_an_import_and_a_push_read_it_too(package: Path, tmp_path: Path) -> None:
    environment = {"INSPECTOR_DATA": str(tmp_path / "data"), "DJANGO_SETTINGS_MODULE": "inspector.settings"}
    paths = f"{package}{os.pathsep}{ROOT}"
    ended = run(package, "-c", DOORS, lines(tmp_path, GOOD), **environment, PYTHONPATH=paths)
    assert "imported 1 ['x']" in ended.stdout and "pushed 1 ['x']" in ended.stdout, ended.stdout + ended.stderr
