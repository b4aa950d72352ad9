"""What the demo policy is trained on, and what its loss covers."""

import random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.environments import ENVIRONMENTS
from rollouts.sampling.environments.arithmetic import is_held_out
from tools.demo_policy.batches import Cutter, batches, encode_dialogues
from tools.demo_policy.dialogues import Dialogue, random_dialogue, training_problem


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def test_no_task_of_the_environment_is_trained_on() -> None:
    rng = random.Random(1)
    trained = [training_problem(rng) for _ in range(3000)]
    assert not any(map(is_held_out, trained))
    asked = {task.messages[-1]["content"] for task in ENVIRONMENTS["calculator"]().tasks(300, seed=1)}
    assert asked.isdisjoint({problem.question for problem in trained})


def test_dialogues_hold_every_kind() -> None:
    rng = random.Random(2)
    dialogues = [random_dialogue(rng) for _ in range(800)]
    calls = [sum("tool_calls" in message for message in dialogue.messages) for dialogue in dialogues]
    assert {0, 1, 2} <= set(calls)
    errors = [message for d in dialogues for message in d.messages if message["content"].startswith("error: ")]
    assert errors
    for dialogue in dialogues:
        assert sum(message["role"] == "assistant" for message in dialogue.messages) == len(dialogue.learned)
        assert dialogue.learned[-1]


def test_loss_covers_the_sampled_span_and_no_mistake(tokenizer: Any) -> None:
    def call(expression: str) -> dict[str, Any]:
        function = {"name": "calculator", "arguments": {"expression": expression}}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    dialogue = Dialogue(
        [
            {"role": "user", "content": "What is 1+2?"},
            call("1+2)"),
            {"role": "tool", "content": "error: the expression cannot be read"},
            call("1+2"),
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        [False, True, True],
    )
    ((ids, mask),) = encode_dialogues(tokenizer, [dialogue], random.Random(0), Cutter(tokenizer))
    learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False)
    assert learned == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call><|im_end|>'
        "It is 3.<|im_end|>"
    )


def test_another_cut_spells_the_same_text(tokenizer: Any) -> None:
    cutter = Cutter(tokenizer)
    ids = tokenizer.encode("<tool_call>The calculator gave back 1234.</tool_call><|im_end|>").ids
    cuts = [cutter.recut(ids, random.Random(seed)) for seed in range(40)]
    assert {tokenizer.decode(cut, skip_special_tokens=False) for cut in cuts} == {
        "<tool_call>The calculator gave back 1234.</tool_call><|im_end|>"
    }
    assert any(cut != ids for cut in cuts)


def test_batches_repeat_with_the_seed(tokenizer: Any) -> None:
    once, again, other = (list(batches(tokenizer, 3, 4, seed)) for seed in (7, 7, 8))
    for left, right in zip(once, again, strict=True):
        assert np.array_equal(left.ids, right.ids) and np.array_equal(left.loss_mask, right.loss_mask)
    assert any(
        left.ids.shape != right.ids.shape or (left.ids != right.ids).any()
        for left, right in zip(once, other, strict=True)
    )
    for batch in once:
        assert batch.loss_mask.any(axis=1).all()
        assert not (batch.loss_mask & ~batch.real).any()
