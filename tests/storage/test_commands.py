"""The commands, as scripts call them."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command, load_command_class

from rollout_inspector.diagnose.checks import CHECKS
from rollouts.store import models
from rollouts.store.models import ProjectTemplate, Run
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl
from tests.storage.build import assert_same

pytestmark = pytest.mark.django_db


def call(*arguments: Any) -> str:
    out = io.StringIO()
    call_command(*map(str, arguments), stdout=out, stderr=out)
    return out.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calls.jsonl"
    second = changed(CALL, "response", "prompt_token_ids", to=[1, 2, 3, 10, 12, 20])
    path.write_bytes(jsonl(CALL, second, b"{", changed(CALL, "session_id", to="s2")))
    return path


def test_import_prints_what_it_did(file: Path) -> None:
    result = json.loads(call("import_rollouts", file, "--run", "mine", "--json"))
    run = models.Run.objects.get(code=result["run"])
    assert (run.name, result["trajectories"], result["steps"], result["rows"]) == ("mine", 2, 3, 3)
    assert result["tokens"] == run.n_tokens == 5 + 4 + 5
    (rejected,) = result["rejected"]
    assert (rejected["file"], rejected["line"]) == ("calls.jsonl", 3) and rejected["reason"]
    assert result["findings"] == run.finding_counts
    text = call("import_rollouts", file)
    assert "2 trajectories, 3 steps" in text and "rejected calls.jsonl:3:" in text and "No tokenizer" in text


def test_import_of_nothing_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"\x80\x04abc")
    with pytest.raises(CommandError, match=r"Nothing was imported. x\.pt is a pickle"):
        call("import_rollouts", tmp_path / "x.pt")
    with pytest.raises(CommandError, match="There is no file"):
        call("import_rollouts", tmp_path / "none", "--json")
    with pytest.raises(CommandError, match="There is no format 'y'"):
        call("import_rollouts", tmp_path / "x.pt", "--format", "y")
    with pytest.raises(CommandError, match="There is no tokenizer"):
        call("import_rollouts", tmp_path / "x.pt", "--tokenizer", "nothing")
    with pytest.raises(CommandError, match=r"x\.pt is not UTF-8 text"):
        call("import_rollouts", tmp_path / "x.pt", "--chat-template", tmp_path / "x.pt")


@pytest.mark.parametrize("command", ["import_rollouts", "diagnose", "replay", "launch_rollouts"])
def test_a_chat_template_that_cannot_render_is_refused_with_its_line(file: Path, command: str, tmp_path: Path) -> None:
    call("import_rollouts", file)
    run = Run.objects.get()
    target = {"import_rollouts": [file], "launch_rollouts": []}.get(command, [run.code])
    template = tmp_path / "broken.jinja"
    for text, sentence in (
        (
            "{{ messages }}\n{% for m in messages %}",
            r"syntax error on line 2: .*endfor.* Mend it, or name another file\.",
        ),
        (" \n", "broken.jinja holds no template text"),
        ("\0{{ messages }}", "broken.jinja holds no template text"),
    ):
        template.write_text(text)
        with pytest.raises(CommandError, match=sentence):
            call(command, *target, "--chat-template", template)
    run.refresh_from_db()
    assert run.chat_template is None and not run.jobs.filter(kind="diagnose").exists()
    assert Run.objects.count() == 1 and not ProjectTemplate.objects.filter(label="broken").exists()


@pytest.mark.parametrize(
    "path", sorted(Path("rollouts/management/commands").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_every_command_explains_itself(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_command_class("rollouts", path.stem).create_parser("manage.py", path.stem).parse_args(["--help"])
    assert ended.value.code == 0 and f"usage: manage.py {path.stem}" in capsys.readouterr().out


def test_findings_are_listed_by_run_and_by_trajectory(file: Path) -> None:
    from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
    from tests.storage.build import ids

    run = create_run(models.Run.Kind.IMPORT, "r")
    from tests.storage.build import chain

    found = Finding(
        Axis.STREAM, "boundary_merge", Severity.ERROR, 1, None, 3, 5, ids(1), ids(2, 3), "a", "b", 2, "Why.",
        "Do.", Cost(9),
    )
    one, _ = save_trajectories(run, [chain("a"), chain("b")], [[found], []])
    (value,) = json.loads(call("findings", run.code, "--json"))
    assert value == {
        "trajectory": one.code, "external_id": "a", "step": 1, "row": None, "axis": "stream", "kind": "boundary_merge",
        "severity": "error", "start": 3, "stop": 5, "expected_ids": [1], "actual_ids": [2, 3], "expected_text": "a",
        "actual_text": "b", "message_index": 2, "evidence": "Why.", "remedy": "Do.", "missing": "",
        "decided": True, "muted": False, "places": [[3, 5]],
        "cost": {
            "trained_tokens_lost": 9, "trained_tokens_wrong": 0, "rows": 1, "prompt_tokens_repaid": 0,
            "lost_in_one_row": 0,
        },
    }
    assert json.loads(call("findings", one.code, "--json")) == [value]
    assert json.loads(call("findings", one.code, "--kind", "branch", "--json")) == []
    assert "boundary_merge  a" in call("findings", run.code) and "1 finding." in call("findings", run.code)
    with pytest.raises(CommandError, match="no run and no trajectory"):
        call("findings", "zzz", "--json")
    with pytest.raises(CommandError, match="no kind 'other'"):
        call("findings", run.code, "--kind", "other")


def test_what_was_checked_is_printed_apart_from_what_was_not(tmp_path: Path) -> None:
    files = []
    for name, line in (("calls", CALL), ("rows", TRAIN)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_bytes(jsonl(line))
    run = models.Run.objects.get(code=json.loads(call("import_rollouts", *files, "--json"))["run"])
    found = {one["name"]: one for one in json.loads(call("findings", run.code, "--checks", "--json"))}
    assert found["lengths"] == {
        "name": "lengths", "claim": CHECKS["lengths"], "checked": 1, "failed": 0, "noted": 0, "not_decidable": 0,
        "needs": [],
    }
    canonical = found["canonical"]
    assert (canonical["checked"], canonical["not_decidable"], canonical["needs"]) == (0, 2, ["steps", "tokenizer"])
    lines = call("findings", run.code, "--checks").splitlines()
    assert lines[0].split() == ["check", "checked", "failed", "not", "decidable", "needs"]
    assert any(line.split() == ["canonical", "0", "0", "2", "steps,", "tokenizer"] for line in lines)
    values = json.loads(call("findings", run.code, "--json"))
    assert {value["decided"] for value in values if value["kind"] == "not_decidable"} == {False}
    assert "not decidable: no calls in the file" in call("findings", run.code)
    rows = run.trajectories.get(n_steps=0)
    (prefix,) = [
        one for one in json.loads(call("findings", rows.code, "--checks", "--json")) if one["name"] == "prefix"
    ]
    assert (prefix["checked"], prefix["not_decidable"], prefix["needs"]) == (0, 1, ["steps"])
    run.trajectories.update(checks=None)
    assert json.loads(call("findings", run.code, "--checks", "--json")) == []
    assert "Of 2 trajectories it is not known" in call("findings", run.code, "--checks")
    with pytest.raises(CommandError, match="exclude each other"):
        call("findings", run.code, "--checks", "--kind", "branch")


def test_export_and_import_again(file: Path, tmp_path: Path) -> None:
    run = models.Run.objects.get(code=json.loads(call("import_rollouts", file, "--json"))["run"])
    out = tmp_path / "out.jsonl"
    assert "2 trajectories written" in call("export_rollouts", run.code, "--output", out)
    again = models.Run.objects.get(code=json.loads(call("import_rollouts", out, "--json"))["run"])
    for one, other in zip(run.trajectories.order_by("index"), again.trajectories.order_by("index"), strict=True):
        assert_same(load_trajectory(one), load_trajectory(other))
    with pytest.raises(CommandError, match="no run"):
        call("export_rollouts", "zzz", "--output", out)
    with pytest.raises(CommandError, match="cannot be written"):
        call("export_rollouts", run.code, "--output", tmp_path / "no" / "such" / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls.jsonl", "out.jsonl"]


def test_a_tokenizer_is_registered_and_a_run_judged_by_it(file: Path, tiny_tokenizer: Path) -> None:
    registered = json.loads(call("register_tokenizer", tiny_tokenizer, "--name", "demo", "--json"))
    assert registered["name"] == "demo" and registered["chat_template"]
    run = models.Run.objects.get(code=json.loads(call("import_rollouts", file, "--json"))["run"])
    assert run.tokenizer is None
    judged = json.loads(call("diagnose", run.code, "--tokenizer", "demo", "--json"))
    run.refresh_from_db()
    assert run.tokenizer is not None and judged["trajectories"] == 2 and judged["findings"] == run.finding_counts
    with pytest.raises(CommandError, match=r"no tokenizer\.json"):
        call("register_tokenizer", file.parent)


def test_the_import_task_reads_what_the_run_names_and_only_once(tmp_path: Path) -> None:
    from rollouts.jobs.imports import imports
    from rollouts.worker.jobs import do_job

    path = tmp_path / "gym.jsonl"
    path.write_bytes(jsonl(GYM))
    run = create_run("import", "task")
    job = imports.ask(run, [path])
    do_job(job.pk)
    do_job(job.pk)
    do_job(10**9)
    run.refresh_from_db()
    assert (run.status, run.n_trajectories) == ("done", 1)


def test_a_folder_of_training_steps_is_imported_with_them(tmp_path: Path) -> None:
    for step in (10, 9):
        folder = tmp_path / "dump" / f"step_{step:06}"
        folder.mkdir(parents=True)
        (folder / "rank_0.jsonl").write_text(json.dumps({"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]]}))
    said = json.loads(call("import_rollouts", tmp_path / "dump", "--json"))
    stored = Run.objects.get(code=said["run"]).trajectories.order_by("index")
    assert list(stored.values_list("training_step", flat=True)) == [9, 10]
    said = json.loads(call("import_rollouts", tmp_path / "dump", "--training-step", "3", "--json"))
    assert set(Run.objects.get(code=said["run"]).trajectories.values_list("training_step", flat=True)) == {3}
    with pytest.raises(CommandError, match="whole number"):
        call("import_rollouts", tmp_path / "dump", "--training-step", "-1")
