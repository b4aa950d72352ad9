"""GRPO of the demo policy: what a step trains, and what each fault does to the gap."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from django.core.management import CommandError, call_command
from transformers import AutoModelForCausalLM

from rollout_inspector.diagnose import examine
from rollout_inspector.diagnose.gap.report import causes_of
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollouts.sampling.demo_policy import MODEL_DIR
from tools.demo_policy.grpo import GrpoSettings, GrpoStep, train

FEW = {"groups": 2, "group_size": 3, "temperature": 1.2, "rate": 1e-3, "threads": 1, "max_tokens": 64}


def steps(n: int = 3, **changes: Any) -> list[GrpoStep]:
    return list(train(GrpoSettings(n, **{**FEW, **changes})))


@pytest.fixture(scope="module")
def clean() -> list[GrpoStep]:
    return steps()


def test_a_clean_run_agrees_and_its_rows_are_what_was_sampled(clean: list[GrpoStep]) -> None:
    assert [made.step for made in clean] == [0, 1, 2] and max(made.gap for made in clean) < 1e-4
    for made in clean:
        assert len(made.trajectories) == 6 and made.reward == np.mean([one.reward for one in made.trajectories])
        for one in made.trajectories:
            sampled = [int(token) for step in one.steps for token in step.completion_ids]
            assert [int(token) for row in one.rows for token in row.ids[row.loss_mask]] == sampled
            assert one.training_step == made.step
            assert {step.policy_version for step in one.steps} == {f"step-{made.step}"}
            assert not [found.kind for found in examine(one, None).findings if found.severity == "error"]


def test_the_trainer_scores_with_its_weights_before_the_update(clean: list[GrpoStep]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32).eval()
    row = clean[0].trajectories[0].rows[0]
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0] / FEW["temperature"]
    whole = torch.log_softmax(logits, -1).numpy()
    for at in np.flatnonzero(row.loss_mask):
        assert row.columns["trainer_logprobs"][at] == pytest.approx(whole[at - 1, row.ids[at]], abs=1e-4)


def test_advantages_are_of_the_group(clean: list[GrpoStep]) -> None:
    for made in clean:
        groups: dict[str, list[Any]] = {}
        for one in made.trajectories:
            groups.setdefault(one.group, []).append(one)
        assert len(groups) == 2
        for members in groups.values():
            rewards = np.array([one.reward for one in members])
            for one, reward in zip(members, rewards, strict=True):
                wanted = (reward - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() else 0.0
                for row in one.rows:
                    assert row.columns["advantages"][row.loss_mask] == pytest.approx(wanted)
                    assert not row.columns["advantages"][~row.loss_mask].any()


def test_the_same_settings_make_the_same_tokens(clean: list[GrpoStep]) -> None:
    """Log-probabilities differ in the last digits: they depend on what is in a batch at the same time."""
    again, first = ([[row.ids.tolist() for row in one.rows] for one in made] for made in (
        steps(1)[0].trajectories, clean[0].trajectories,
    ))
    assert again == first


def test_weights_that_are_not_delivered_open_a_gap(clean: list[GrpoStep]) -> None:
    kept = steps(deliver_every=0)
    assert kept[0].gap < 1e-4 < 10 * clean[-1].gap + 1e-3 < kept[-1].gap
    assert {step.policy_version for one in kept[-1].trajectories for step in one.steps} == {"step-0"}


def test_a_cache_that_is_kept_is_stale_on_prompts_that_come_again() -> None:
    made = steps(5, reset_cache=False, repeated=1)
    collector = GapCollector()
    for one in (one for step in made for one in step.trajectories):
        collector.add(one, enumerate(one.rows))
    found = [cause.cause for cause in causes_of(collector.done())[0]]
    assert "stale_cache" in found, [step.gap for step in made]


def test_another_temperature_of_the_trainer_is_there_from_the_first_step() -> None:
    assert steps(1, trainer_temperature=0.8)[0].gap > 0.01


def test_a_sampler_in_bfloat16_opens_a_small_gap_of_its_own() -> None:
    assert 1e-4 < steps(1, sampler_dtype="bfloat16")[0].gap < 0.05


def test_rows_that_are_encoded_again_hold_the_sampled_values_in_order() -> None:
    (made,) = steps(1, strategy="retokenize")
    for one in made.trajectories:
        sampled = np.concatenate([step.logprobs for step in one.steps])
        for row in one.rows:
            assert row.logprobs is not None
            held = row.logprobs[row.loss_mask]
            n = min(len(held), len(sampled))
            assert held[:n].tolist() == sampled[:n].tolist() and not held[n:].any()


def test_the_command_writes_a_file_of_each_step(tmp_path: Path) -> None:
    out = io.StringIO()
    few = ("--groups", "1", "--group-size", "2", "--threads", "1")
    call_command("train_demo_policy", "--grpo", "1", "--output", str(tmp_path / "run"), *few, stdout=out)
    (file,) = (tmp_path / "run").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "step_000000.jsonl" and [line["training_step"] for line in lines] == [0, 0]
    assert "step 1/1  reward " in out.getvalue()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Say where the steps go"),
        (("--output", "x", "--groups", "0"), "--groups must be at least 1"),
        (("--output", "x", "--repeated", "9"), "from 0 to --groups"),
        (("--output", "x", "--temperature", "0"), "--temperature must be a number above 0"),
        (("--output", "x", "--trainer-temperature", "nan"), "--trainer-temperature must be a number above 0"),
        (("--output", "x", "--rate", "inf"), "--rate must be a number above 0"),
        (("--output", __file__), "cannot be made: File exists"),
        (("--output", "x", "--deliver-every", "-1"), "--deliver-every must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        call_command("train_demo_policy", "--grpo", "2", *options)
