"""Runs written for trainers, with their own rows and with those of another strategy."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.replay import replay
from rollout_inspector.text.chat_templates.sandbox import client
from rollouts.jobs.exports.exports import WRITERS
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.jobs.replays import replay_context
from rollouts.store import models
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.worker import run_rollouts
from tests.storage.build import chain

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]


@pytest.fixture
def run(tiny_tokenizer: Path) -> models.Run:
    run = launch(LaunchSettings(prompts=3, group=1, seed=2, temperature=0.0), enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    assert run.status == "done"
    return run


def export(run: models.Run | models.StoredTrajectory, name: str, folder: Path, *more: Any) -> bytes:
    out = folder / "out"
    call_command("export_rollouts", run.code, "--format", name, "--output", out, *more, stdout=io.StringIO())
    return out.read_bytes()


def test_every_format_of_a_launched_run_is_read_again(run: models.Run, tmp_path: Path) -> None:
    for name in WRITERS:
        chosen, items = read(Source.of_bytes(export(run, name, tmp_path, "--force")))
        found = list(items)
        assert found and all(hasattr(one, "external_id") for one in found), (name, chosen.name, found)


def test_our_own_format_names_the_tokenizer_of_the_run(run: models.Run, tmp_path: Path) -> None:
    assert run.tokenizer is not None
    for name in ("own_jsonl", "own_parquet"):
        export(run, name, tmp_path)
        call_command("import_rollouts", str(tmp_path / "out"), stdout=io.StringIO())
        again = models.Run.objects.order_by("-pk")[0]
        assert again.tokenizer == run.tokenizer and "not_decidable" not in again.finding_counts


@pytest.mark.sqlite_only  # its queries are those of the other exports
def test_a_strategy_gives_its_own_rows(run: models.Run, tmp_path: Path) -> None:
    steps = sum(len(value.steps) for value in load_trajectories(list(run.trajectories.all())))
    merged = json.loads(export(run, "skyrl", tmp_path, "--strategy", "tool_delta"))
    single = json.loads(export(run, "skyrl_step_wise", tmp_path, "--strategy", "step_wise"))
    assert len(merged["response_ids"]) == run.n_trajectories and len(single["response_ids"]) == steps
    with pytest.raises(CommandError, match="cannot be exported as verl: It has no log-probabilities"):
        export(run, "verl", tmp_path, "--strategy", "retokenize")
    with pytest.raises(CommandError, match=r"Every trajectory would be left out.* It has no log-probabilities"):
        export(run, "verl", tmp_path, "--strategy", "retokenize", "--leave-out")
    lines = export(run, "sft", tmp_path, "--strategy", "retokenize", "--pad-to", 4000, "--pad-id", 7).splitlines()
    assert [len(json.loads(line)["input_ids"]) for line in lines] == [4000] * run.n_trajectories


@pytest.mark.sqlite_only  # its queries are those of the other exports
def test_a_strategy_renders_many_trajectories_at_once(
    run: models.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[int] = []
    real = client.Pool.render

    def counted(self: client.Pool, template: str, jobs: Sequence[Any]) -> list[client.Rendered]:
        trips.append(len(jobs))
        return real(self, template, jobs)

    monkeypatch.setattr(client.Pool, "render", counted)
    lines = export(run, "sft", tmp_path, "--strategy", "retokenize").splitlines()
    assert len(trips) == 2  # one finds the form of arguments that the template takes
    context, tokenizer = replay_context.context_of(run)
    for line, value in zip(lines, load_trajectories(list(run.trajectories.order_by("index"))), strict=True):
        (row,) = replay(
            replay_context.complete_replies(value, tokenizer, context), STRATEGIES["retokenize"], context
        ).rows
        assert json.loads(line)["input_ids"] == row.ids.tolist()


def test_what_cannot_be_written_is_left_out_and_named(tmp_path: Path) -> None:
    run = create_run(models.Run.Kind.IMPORT, "r")
    save_trajectories(run, [chain("a"), chain("b", broken_at=1), chain("c")], [[], [], []])
    out, told, errors = tmp_path / "out", io.StringIO(), io.StringIO()
    asked = ("export_rollouts", run.code, "--format", "skyrl", "--leave-out", "--output", out)
    call_command(*asked, stdout=told, stderr=errors)
    assert len(json.loads(out.read_bytes())["response_ids"]) == 2 and "2 rows written" in told.getvalue()
    named, count = errors.getvalue().splitlines()
    assert named.startswith("Left out: Trajectory 'b' cannot be exported as skyrl: It is 2 rows")
    assert count == "1 of 3 trajectories was left out."
    run.trajectories.exclude(external_id="b").delete()
    with pytest.raises(CommandError, match=r"Every trajectory would be left out.* The first: Trajectory 'b' cannot"):
        call_command(*asked, stderr=io.StringIO())
    with pytest.raises(CommandError, match="not allowed with argument"):
        call_command(*asked, "--force")


def test_a_discontinuous_trajectory_is_skipped_and_named(tmp_path: Path) -> None:
    run = create_run(models.Run.Kind.IMPORT, "r")
    save_trajectories(run, [chain("a"), chain("b", broken_at=1)], [[], []])
    out, errors = tmp_path / "out", io.StringIO()
    asked = ("export_rollouts", run.code, "--format", "nemo_message_log", "--output", out)
    call_command(*asked, stdout=io.StringIO(), stderr=errors)
    assert len(out.read_bytes().splitlines()) == 3
    call_command(*asked, "--skip-discontinuous", stdout=io.StringIO(), stderr=errors)
    assert len(out.read_bytes().splitlines()) == 1 and "'b'" in errors.getvalue()


def test_the_text_of_messages_is_decoded(run: models.Run, tmp_path: Path) -> None:
    log = json.loads(export(run, "nemo_message_log", tmp_path).splitlines()[0])["message_log"]
    assert all(message["content"] for message in log)


def test_a_strategy_needs_a_tokenizer_and_messages(tmp_path: Path, run: models.Run) -> None:
    bare = create_run(models.Run.Kind.IMPORT, "r")
    save_trajectories(bare, [chain("a", hostile="")], [[]])
    with pytest.raises(CommandError, match="no tokenizer"):
        export(bare, "verl", tmp_path, "--strategy", "tool_delta")
    bare.tokenizer, bare.chat_template = run.tokenizer, run.chat_template
    bare.save()
    from dataclasses import replace

    value = chain("b", hostile="")
    silent = replace(value, steps=tuple(replace(step, request=None) for step in value.steps))
    save_trajectories(bare, [silent], [[]])
    err = io.StringIO()
    with pytest.raises(CommandError, match=r"'b' has no rows under tool_delta: .*without messages"):
        export(bare.trajectories.get(external_id="b"), "verl", tmp_path, "--strategy", "tool_delta")
    out = tmp_path / "out"
    call_command(
        "export_rollouts", bare.code, "--format", "verl", "--strategy", "tool_delta", "--force", "--output", out,
        stdout=io.StringIO(), stderr=err,
    )
    assert out.exists() and "Left out: Trajectory 'b'" in err.getvalue()
    with pytest.raises(CommandError, match=r"Every trajectory would be left out.* 'b' has no rows under"):
        export(bare.trajectories.get(external_id="b"), "verl", tmp_path, "--strategy", "tool_delta", "--force")


@pytest.mark.sqlite_only  # its queries are those of the other exports
def test_the_stored_finding_says_why_there_is_more_than_one_row(tmp_path: Path) -> None:
    run = create_run(models.Run.Kind.IMPORT, "r")
    found = Finding(Axis.STREAM, "boundary_merge", Severity.ERROR, step=1, evidence="Two tokens became one.")
    save_trajectories(run, [chain("b", broken_at=1)], [[found]])
    with pytest.raises(CommandError, match=r"'b' .* Finding boundary_merge at step 1: Two tokens became one\."):
        export(run, "skyrl", tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CommandError, match="--pad-to"):
        export(run, "verl", tmp_path, "--pad-to", 9)
