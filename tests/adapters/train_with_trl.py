"""Trains the demo policy for two steps with TRL's GRPOTrainer, and again with a ``rollout_func`` that calls a tool.

Run by tests/adapters/test_trl.py in a process of its own. Prints what the trainer held, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollouts.adapters.trl import TrlStream
from rollouts.demo_policy import MODEL_DIR


def reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [None if n == 0 else float(n) for n in range(len(completions))]


def asked_twice(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """Two calls each, with an observation of two tokens between them that nobody sampled."""
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for prompt in prompts:
        ids = trainer.processing_class.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        stream, completion, mask = list(ids), [], []
        for turn in range(2):
            made = trainer.model.generate(torch.tensor([stream]), max_new_tokens=3, min_new_tokens=3, do_sample=True)
            new = made[0, len(stream) :].tolist() + [7, 8] * (turn == 0)
            completion, mask, stream = completion + new, mask + [1] * 3 + [0] * (len(new) - 3), stream + new
        for name, values in zip(found, (ids, completion, [-0.5] * len(mask), mask), strict=True):
            found[name].append(values)
    return found


def train(folder: Path, **more: Any) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1 = ?"}]} for n in range(8)]
    arguments = GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=4, num_generations=2, max_completion_length=8, max_steps=2,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL_DIR), reward_funcs=reward, args=arguments,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(MODEL_DIR), **more,
    )
    trainer.add_callback(TrlStream(trainer, folder=folder / "fragments"))
    callback = trainer.callback_handler.callbacks[-1]
    held, generate = [], trainer._generate_and_score_completions

    def kept(inputs: Any) -> Any:
        batch = generate(inputs)
        held.append({name: value.tolist() for name, value in batch.items() if hasattr(value, "tolist")})
        return batch

    trainer._generate_and_score_completions = kept
    trainer.train()
    counts = callback.stream.close()
    assert counts.stored == counts.taken == 8 and counts.dropped == 0, counts
    return [{"run": callback.stream.run, **one} for one in held]


folder = Path(sys.argv[1])
print(json.dumps([train(folder / "plain"), train(folder / "tool", rollout_func=asked_twice)]))
