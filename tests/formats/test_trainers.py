"""Our exports before the trainers' own validators and collators, taken out of their published packages."""

import io
import json
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollouts.formats.writers.exports import EXPORTS, padded, rows_of, write
from rollouts.tito.trajectory import Trajectory
from tests.formats.published import taken_from
from tests.storage.build import chain

VALUES = [chain("g-0", 3), chain("g-1", 1, seed=1), chain("h-0", 4, seed=2)]
BROKEN = chain("g-2", 3, seed=3, broken_at=1)


def lines(name: str, *values: Trajectory, **more: Any) -> list[Any]:
    file = io.BytesIO()
    write(more.pop("target", EXPORTS[name]), values, file, **more)
    return [json.loads(line) for line in file.getvalue().splitlines()]


# -- SkyRL


@pytest.fixture(scope="module")
def skyrl() -> Any:
    return taken_from(
        "skyrl", "skyrl/train/utils/trainer_utils.py", ["validate_generator_output", "_validate_step_wise_fields"],
        {"np": np, "logger": logging.getLogger("skyrl")},
    ).validate_generator_output


def test_skyrl_accepts_whole_trajectories(skyrl: Any) -> None:
    (batch,) = lines("skyrl", *VALUES)
    skyrl(3, batch)
    with pytest.raises(AssertionError, match="Mismatch between prompts"):
        skyrl(3, lines("skyrl", *VALUES, BROKEN, force=True)[0])


def test_skyrl_accepts_steps(skyrl: Any) -> None:
    (batch,) = lines("skyrl_step_wise", *VALUES, BROKEN)
    skyrl(4, batch, step_wise=True)
    for key, value in {
        "is_last_step": [*batch["is_last_step"][:-1], False], "trajectory_ids": batch["trajectory_ids"][::-1],
        "loss_masks": batch["loss_masks"][::-1],
    }.items():
        with pytest.raises(AssertionError):
            skyrl(4, {**batch, key: value}, step_wise=True)


# -- TRL


def test_trl_collates_supervised_rows_as_our_padding_does() -> None:
    torch = pytest.importorskip("torch")
    from dataclasses import dataclass

    from transformers.data.data_collator import DataCollatorMixin

    around = {"torch": torch, "np": np, "dataclass": dataclass, "DataCollatorMixin": DataCollatorMixin}
    pad = taken_from("trl", "trl/trainer/utils.py", ["pad"], around).pad
    collator = taken_from(
        "trl", "trl/trainer/sft_trainer.py", ["DataCollatorForLanguageModeling"], {**around, "pad": pad}
    ).DataCollatorForLanguageModeling(pad_token_id=9)
    batch = collator.torch_call(lines("sft", *VALUES))
    longest = max(len(rows_of(value)[0].ids) for value in VALUES)
    ours = lines("sft", *VALUES, target=padded(EXPORTS["sft"], longest, pad_id=9))
    for key in ("input_ids", "labels", "attention_mask"):
        assert batch[key].tolist() == [one[key] for one in ours]


def test_trl_takes_what_rollout_func_must_give() -> None:
    """grpo_trainer.py: these keys are required, and with ``env_mask`` each list has an element for each prompt."""
    (batch,) = lines("trl", *VALUES)
    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask"} <= batch.keys()
    assert {len(column) for column in batch.values()} == {len(VALUES)}
    for completion, logprobs, mask in zip(batch["completion_ids"], batch["logprobs"], batch["env_mask"], strict=True):
        assert len(completion) == len(logprobs) == len(mask) and set(mask) <= {0, 1}


# -- Tinker


class Chunk(SimpleNamespace):
    def __init__(self, tokens: list[int]) -> None:
        super().__init__(tokens=list(tokens))  # the package's own class copies too

    @property
    def length(self) -> int:
        return len(self.tokens)


class Input(SimpleNamespace):
    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


def test_tinker_builds_the_same_data_from_the_same_steps() -> None:
    torch = pytest.importorskip("torch")
    tinker = SimpleNamespace(
        EncodedTextChunk=Chunk, ModelInput=Input, Datum=SimpleNamespace, SampledProvenanceSpan=(),
        ModelInputChunk=object, types=SimpleNamespace(EncodedTextChunk=Chunk), ImageChunk=(),
    )
    around: dict[str, Any] = {
        "tinker": tinker, "torch": torch, "TensorData": SimpleNamespace(from_torch=lambda tensor: tensor.tolist()),
        "PARSE_ERROR_MASKED_METRIC_KEY": "masked",
    }
    shift = "create_rightshifted_model_input_and_leftshifted_targets"
    around[shift] = getattr(
        taken_from("tinker-cookbook", "tinker_cookbook/supervised/common.py", [shift], around), shift
    )
    helpers = ["_is_prefix", "_flat_ob_token_len", "_flat_ob_to_model_input", "_flatten_chunks", "trajectory_to_data"]
    build = taken_from("tinker-cookbook", "tinker_cookbook/rl/data_processing.py", helpers, around).trajectory_to_data
    for value in (*VALUES, BROKEN):
        transitions = [
            SimpleNamespace(
                ob=Input(chunks=[Chunk(tokens=step.prompt_ids.tolist())]), metrics={},
                ac=SimpleNamespace(
                    tokens=step.completion_ids.tolist(), logprobs=np.asarray(step.logprobs).tolist(), sequence_id=None
                ),
            )
            for step in value.steps
        ]
        theirs = build(SimpleNamespace(transitions=transitions), 1.0, include_provenance=False)
        ours = lines("tinker", value)
        assert len(theirs) == len(ours) == len(rows_of(value))
        for datum, one in zip(theirs, ours, strict=True):
            assert [token for chunk in datum.model_input.chunks for token in chunk.tokens] == one["model_input"]
            for key in ("target_tokens", "mask"):
                assert datum.loss_fn_inputs[key] == one[key]
            assert datum.loss_fn_inputs["logprobs"] == pytest.approx(one["logprobs"])


# -- what is published nowhere, restated


def test_prime_rl_samples_are_four_lists_of_one_length() -> None:
    """src/prime_rl/transport/types.py: "All four arrays share the length of token_ids"; mask is of booleans."""
    import msgspec

    class TrainingSample(msgspec.Struct):
        token_ids: list[int]
        mask: list[bool]
        logprobs: list[float]
        temperatures: list[float]
        env_name: str
        advantages: list[float] | None = None
        reward: float | None = None

    for line in lines("prime_rl", *VALUES, BROKEN):
        made = msgspec.convert(line, TrainingSample)
        assert len({len(made.token_ids), len(made.mask), len(made.logprobs), len(made.temperatures)}) == 1
        assert all(value == 0 for value, trained in zip(made.logprobs, made.mask, strict=True) if not trained)


def test_nemo_messages_tile_the_row() -> None:
    """nemo_rl/data/llm_message_utils.py concatenates the messages' tensors key by key; lengths must agree in each."""
    for value, line in zip(VALUES, lines("nemo_message_log", *VALUES), strict=True):
        log = line["message_log"]
        assert [token for message in log for token in message["token_ids"]] == rows_of(value)[0].ids.tolist()
        for message in log:
            assert len(message["token_ids"]) == len(message["token_loss_mask"]) > 0
            assert set(message["token_loss_mask"]) == {int(message["role"] == "assistant")}
            assert message["role"] != "assistant" or len(message["generation_logprobs"]) == len(message["token_ids"])
        assert all(one["role"] != other["role"] for one, other in pairwise(log))
