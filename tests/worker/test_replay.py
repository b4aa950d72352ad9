"""Strategies replayed over what is stored."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.store.models import Run
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]


@pytest.fixture
def run(tiny_tokenizer: Path) -> Run:
    run = launch(LaunchSettings(prompts=6, group=1, seed=2, temperature=0.0), enqueue=False)
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    assert run.status == "done"
    return run


def replayed(*arguments: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    call_command("replay", *arguments, "--json", stdout=out)
    result: list[dict[str, Any]] = json.loads(out.getvalue())
    return result


def test_every_strategy_over_a_run(run: Run) -> None:
    made = replayed(run.code, "--strategy", "all")
    assert len(made) == 6 * len(STRATEGIES)
    # No renderer of that package is written for the demo policy's own template.
    assert all(one["refused"] for one in made if one["strategy"] == "bridge")
    for one in (one for one in made if one["strategy"] != "bridge"):
        assert one["refused"] is None and one["rows_count"] == len(one["rows"]) >= 1
        for row in one["rows"]:
            assert len(row["ids"]) == len(row["loss_mask"]) == len(row["origin"])
            assert row["logprobs"] is None or len(row["logprobs"]) == len(row["ids"])
        assert one["trained_tokens"] == sum(sum(row["loss_mask"]) for row in one["rows"])


def test_the_strategy_that_made_a_run_gives_it_again(run: Run) -> None:
    for one in replayed(run.code, "--strategy", "tool_delta"):
        record = run.trajectories.get(code=one["trajectory"])
        last = load_trajectory(record).steps[-1]
        (row,) = one["rows"]
        assert row["ids"] == last.stream.tolist() and one["differs_at"] is None
        assert (one["trained_tokens"], one["lost_tokens"]) == (record.n_sampled, 0)
        assert one["prompt_tokens_repaid"] == 0


@pytest.mark.sqlite_only  # its queries are those of the other replays
def test_step_wise_pays_for_its_prompts_again(run: Run) -> None:
    for one in replayed(run.code, "--strategy", "step_wise"):
        steps = load_trajectory(run.trajectories.get(code=one["trajectory"])).steps
        assert one["rows_count"] == len(steps) and one["lost_tokens"] == 0
        assert one["prompt_tokens_repaid"] == sum(len(step.stream) for step in steps[:-1])


@pytest.mark.sqlite_only  # its queries are those of the other replays
def test_retokenize_has_no_logprobs_and_no_sampled_origin(run: Run) -> None:
    for one in replayed(run.code, "--strategy", "retokenize"):
        assert all(row["logprobs"] is None and "sampled" not in row["origin"] for row in one["rows"])


def test_one_trajectory_and_words_for_people(run: Run) -> None:
    code = run.trajectories.first().code  # type: ignore[union-attr]
    out = io.StringIO()
    call_command("replay", code, stdout=out)
    lines = out.getvalue().splitlines()
    assert len(lines) == len(STRATEGIES) and all(line.startswith(code) for line in lines)


@pytest.mark.sqlite_only  # its queries are those of the other replays
def test_what_cannot_be_replayed_is_a_sentence(run: Run) -> None:
    with pytest.raises(CommandError, match="no strategy named 'hope'"):
        replayed(run.code, "--strategy", "hope")
    with pytest.raises(CommandError, match="There is no run and no trajectory with the code"):
        replayed("nobody")
    with pytest.raises(CommandError, match="cannot be used"):
        replayed(run.code, "--tokenizer", "/nowhere")
    Run.objects.filter(pk=run.pk).update(tokenizer=None)
    made = replayed(run.code, "--strategy", "all")
    assert len(made) == 6 * len(STRATEGIES)
    for one in made:  # the step-wise strategies render nothing, so they need no tokenizer
        refused = "has no tokenizer" in (one["refused"] or "")
        assert refused is not one["strategy"].startswith("step_wise"), one["strategy"]


@pytest.mark.sqlite_only  # its queries are those of the other replays
def test_recorded_calls_of_other_trainers(corpus: Path) -> None:
    out = io.StringIO()
    call_command(
        "import_rollouts", str(corpus / "labelled" / "qwen2.5.calls.jsonl"), "--tokenizer",
        str(corpus / "tokenizers" / "qwen2.5"), "--chat-template", str(corpus / "templates" / "qwen2.5.jinja"),
        "--json", stdout=out,
    )
    code = json.loads(out.getvalue())["run"]
    made = replayed(code, "--strategy", "all", "--no-rows")
    assert len(made) == len(STRATEGIES) * Run.objects.get(code=code).n_trajectories
    by_slug = {slug: [one for one in made if one["strategy"] == slug] for slug in STRATEGIES}
    assert any(one["differs_at"] for one in by_slug["tool_delta"])
    assert any(not one["refused"] for one in by_slug["tool_delta"])
    assert all("generation" in one["refused"] for one in by_slug["retokenize"])
