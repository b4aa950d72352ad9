"""TRL's own GRPOTrainer trains the demo policy for two steps on the CPU, and its rollouts arrive at a live server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.client.adapters.trl import TrlStream
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.store.models import Run
from rollouts.store.people.shares import create_api_key
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.adapters.conftest import FakeServer
from tests.conftest import ROOT, missing
from tests.people import make_member


def unpadded(values: list[Any], mask: list[int]) -> list[Any]:
    return [value for value, is_real in zip(values, mask, strict=True) if is_real]


def check(found: Trajectory, held: dict[str, Any], i: int) -> None:
    """A trajectory is what the trainer held at a place of its batch."""
    (row,) = found.rows
    prompt = unpadded(held["prompt_ids"][i], held["prompt_mask"][i])
    n = len(row.ids) - len(prompt)
    assert row.ids.tolist() == prompt + held["completion_ids"][i][:n]
    sampled = held.get("tool_mask", held["completion_mask"])[i][:n]
    assert row.loss_mask.tolist() == [False] * len(prompt) + [bool(one) for one in sampled]
    advantages = np.where(row.loss_mask, held["advantages"][i], 0.0)
    assert row.columns["advantages"].tolist() == pytest.approx(advantages.tolist())
    assert found.reward == (None if i == 0 else float(i)) and found.group.endswith(str(i // 2))
    assert {step.policy_version for step in found.steps} == {f"step-{found.training_step}"}


@pytest.mark.django_db(transaction=True)
@pytest.mark.sqlite_only
def test_two_steps_of_grpo_arrive(live_server: Any, tmp_path: Path, sent: list[int]) -> None:
    needed = Path(os.environ.get("INSPECTOR_TEST_TRL") or Path(sys.prefix) / "trl")
    if not (needed / "accelerate").is_dir():
        missing(f"{needed} has no accelerate; `make .venv/.installed-dev` installs tests/adapters/requirements-trl.txt")
    environment = {
        **os.environ, "ROLLOUT_INSPECTOR_URL": live_server.url, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "ROLLOUT_INSPECTOR_TOKEN": create_api_key(make_member("bob"))[1], "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(needed)]),
    }
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("train_with_trl.py")), str(tmp_path)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    plain, tool = json.loads(ran.stdout.splitlines()[-1])
    for held in (plain, tool):
        run = Run.objects.get(code=held[0]["run"])
        assert run.n_trajectories == 8 and run.n_rejected == 0
        for step, batch in enumerate(held):
            kept = run.trajectories.filter(training_step=step).order_by("index")
            assert len(kept) == 4
            for i, one in enumerate(kept):
                found = load_trajectory(one)
                check(found, batch, i)
                if held is plain:
                    (call,) = found.steps
                    assert call.request is not None and call.request.messages[0]["content"].endswith("+ 1 = ?")
                    assert call.reply is not None and call.logprobs is None
                else:
                    first, second = found.steps
                    assert second.prompt_ids.tolist() == [*first.stream.tolist(), 7, 8]
                    assert len(second.completion_ids) == 3
                    assert second.logprobs is not None and second.logprobs.tolist() == [-0.5] * 3


class FakeTrainer(SimpleNamespace):
    """The attributes of a trainer that the callback reads."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            accelerator=SimpleNamespace(num_processes=1, process_index=0), model=SimpleNamespace(training=True),
            state=SimpleNamespace(global_step=3), _calculate_rewards=lambda *_: None,
            _generate_and_score_completions=lambda inputs: {"unknown": inputs}, **more,
        )


def test_a_shape_that_is_not_known_stops_no_training(server: FakeServer, tmp_path: Path) -> None:
    trainer = FakeTrainer()
    stream = RolloutStream(server.url, "t", "r", folder=tmp_path)
    callback = TrlStream(trainer, stream)
    trainer._generate_and_score_completions = (lambda outer: lambda inputs: outer(inputs))(callback._generate_and_score)
    callback._generate = lambda inputs: (trainer._calculate_rewards([], [], [], [[1]]), {"unknown": inputs})[1]
    assert trainer._generate_and_score_completions("x") == {"unknown": "x"}
    assert stream.counts.dropped_unreadable == 1 and stream.counts.taken == 0
    trainer._calculate_rewards = callback._calculate_rewards
    callback._calculate = lambda prompts, completions, more: "rewards"
    callback._generate = lambda inputs, more: trainer._calculate_rewards([], [], more=1)
    assert callback._generate_and_score("x", more=2) == "rewards" and stream.counts.dropped_unreadable == 2
    assert callback.on_step_end() is None
    stream.close()


def test_what_cannot_be_streamed_is_said_at_the_start(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="GRPOTrainer"):
        TrlStream(SimpleNamespace(), url=server.url, token="t", folder=tmp_path)
    trainer = FakeTrainer()
    trainer.accelerator.num_processes = 2
    with pytest.raises(ValueError, match="ROLLOUT_INSPECTOR_RUN"):
        TrlStream(trainer, url=server.url, token="t", folder=tmp_path)
