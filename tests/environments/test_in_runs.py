"""Each kind of environment in a real run: tasks stored, the demo policy sampled, rewards and observations kept."""

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import CommandError, call_command
from django.test import Client

from rollouts.jobs.launch import LaunchRefused, LaunchSettings, launch
from rollouts.sampling.environments import Task
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.worker import run_rollouts
from tests.conftest import Take, missing

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines")]

ASK = [{"role": "user", "content": "What is 6 * 7?"}]


def finished(
    environment: str, prompts: list[Task] | None = None, **changes: object
) -> tuple[Run, list[StoredTrajectory]]:
    package = environment.partition(":")[0]
    if ":" in environment and importlib.util.find_spec(package) is None:
        missing(
            f"{package} is not installed (pip install --no-deps -r rollouts/sampling/environments/requirements.txt)"
        )
    form = replace(LaunchSettings(prompts=2, group=1, seed=7, environment=environment), **changes)
    run = launch(form, enqueue=False, prompts=prompts or [])
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    assert (run.status, run.n_failed, run.error) == ("done", 0, "")
    return run, list(run.trajectories.order_by("index"))


def test_prompts_of_a_file_are_scored_where_they_have_an_answer() -> None:
    _, (with_answer, without) = finished("prompts", [Task(ASK, answer="42"), Task(ASK)])
    assert with_answer.reward in (0.0, 1.0) and set(with_answer.reward_parts) == {"exact", "last_number"}
    assert (without.reward, without.reward_parts) == (None, {})
    step = load_trajectory(without).steps[0]
    assert step.request is not None and list(step.request.messages) == ASK


def test_skyrl_gyms_observations_are_turns_of_the_user() -> None:
    _, trajectories = finished("skyrl_gym:gsm8k_multi_turn", max_turns=3, max_tokens=96, temperature=0.0)
    longest = max((load_trajectory(one) for one in trajectories), key=lambda one: len(one.steps))
    assert len(longest.steps) > 1
    last = longest.steps[-1].request
    assert last is not None and last.messages[-1]["role"] == "user" and "####" in last.messages[-1]["content"]
    # Token in, token out: what was sampled stands in the next prompt as it was sampled.
    first, second = longest.steps[:2]
    assert second.prompt_ids[: len(first.stream)].tolist() == first.stream.tolist()


def test_a_data_set_of_reasoning_gym_scores() -> None:
    _, trajectories = finished("reasoning_gym:chain_sum")
    for one in trajectories:
        assert set(one.reward_parts) == {"score", "formatted"} and one.reward == one.reward_parts["score"]


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ("skyrl_gym:gsm8k", ()),
        ("reasoning_gym:chain_sum", ("score", "formatted")),
        ("prompts", ("exact", "last_number")),
    ],
)
def test_each_is_launched_through_the_form_and_shows_its_parts(
    environment: str, parts: tuple[str, ...], admin_client: Client, broker: Take
) -> None:
    broker(lambda _, key: run_rollouts.work_on(key))
    fields = admin_client.get("/runs/new").context["form"]
    asked = {name: field.value() for name, field in ((one.name, one) for one in fields) if field.value() is not None}
    asked |= {"environment": environment, "prompts": 2, "group": 1, "seed": 7, "max_turns": 2, "max_tokens": 48}
    if environment == "prompts":
        line = json.dumps({"messages": ASK, "answer": "42"}).encode()
        asked["prompts_file"] = SimpleUploadedFile("prompts.jsonl", line)
    answer = admin_client.post("/runs/new", asked)
    assert answer.status_code == 302, answer.context["form"].errors
    run = Run.objects.get()
    assert (run.status, run.n_finished, run.n_rewards) == ("done", 2, 2)
    for one in run.trajectories.all():
        assert one.reward is not None and set(parts) <= set(one.reward_parts)
        page = admin_client.get(f"/trajectories/{one.code}").content.decode()
        assert all(f"{name} {one.reward_parts[name]:g}" in page for name in parts)


@pytest.mark.parametrize(
    ("environment", "says"),
    [("skyrl_gym:lcb", "executes code"), ("prompts", "needs a JSONL file"), ("chess", "no environment named 'chess'")],
)
def test_what_cannot_be_launched_says_why_and_leaves_nothing(environment: str, says: str) -> None:
    with pytest.raises(LaunchRefused) as caught:
        launch(LaunchSettings(environment=environment), enqueue=False)
    assert says in caught.value.problems["environment"]
    assert not Run.objects.exists()


def test_a_task_that_cannot_start_fails_its_own_trajectory() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        missing(
            "reasoning_gym is not installed (pip install --no-deps -r rollouts/sampling/environments/requirements.txt)"
        )
    run = launch(LaunchSettings(environment="reasoning_gym:chain_sum", prompts=2, group=1, seed=7), enqueue=False)
    bad = run.trajectories.select_related("task").order_by("index")[0]
    assert bad.task is not None
    bad.task.body = bad.task.body.replace('"index":0', '"index":9').replace('"index": 0', '"index": 9')
    bad.task.save()
    run_rollouts.work_on(run.pk)
    statuses = {one.index: (one.status, one.error) for one in run.trajectories.all()}
    assert statuses[0][0] == "failed" and "install the same version" in statuses[0][1]
    assert statuses[1][0] == "done"


def test_the_command_takes_a_file_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)  # the rollouts are then made in this process
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": ASK, "answer": 42}) + "\n")
    out = io.StringIO()
    arguments = ["--environment", "prompts", "--prompts", "1", "--group", "2", "--wait", "--json"]
    call_command("launch_rollouts", *arguments, "--prompts-file", str(path), stdout=out, stderr=io.StringIO())
    assert json.loads(out.getvalue())["rewards"]["n"] == 2

    path.write_text(json.dumps({"messages": []}) + "\n")
    with pytest.raises(CommandError, match="Line 1: "):
        call_command("launch_rollouts", *arguments, "--prompts-file", str(path))
    with pytest.raises(CommandError, match="cannot be read"):
        call_command("launch_rollouts", *arguments, "--prompts-file", str(tmp_path / "none"))
