"""The trained demo policy: its size, its training step, and whole episodes on problems it has not seen."""

import json

import numpy as np
import pytest
import torch
import transformers

from rollouts.sampling.demo_policy import MODEL_DIR
from tools.demo_policy.batches import batches
from tools.demo_policy.evaluate import evaluate
from tools.demo_policy.train import batch_loss, build_tokenizer, new_model, train


def test_the_model_is_small_and_of_the_named_architecture() -> None:
    assert (MODEL_DIR / "model.safetensors").stat().st_size <= 8 * 2**20
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 2048


def test_the_tokenizer_is_made_the_same_again() -> None:
    assert json.loads(build_tokenizer(0).to_str()) == json.loads((MODEL_DIR / "tokenizer.json").read_text())


def test_sharing_the_prefix_leaves_loss_and_gradient_alike() -> None:
    tokenizer = build_tokenizer(0)
    torch.manual_seed(0)
    model = new_model(tokenizer)
    batch = next(iter(batches(tokenizer, 1, 3, seed=0)))
    shared = batch_loss(model, batch)
    shared.backward()
    gradient = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    n = len(batch.prefix)
    ids = torch.from_numpy(np.concatenate([np.repeat(batch.prefix[None], 3, 0), batch.ids], axis=1))
    labels = ids.masked_fill(torch.from_numpy(~np.pad(batch.loss_mask, ((0, 0), (n, 0)))), -100)
    attention = torch.from_numpy(np.pad(batch.real, ((0, 0), (n, 0)), constant_values=True)).long()
    plain = model(input_ids=ids, attention_mask=attention, labels=labels).loss
    plain.backward()
    assert shared.item() == pytest.approx(plain.item(), abs=1e-5)
    assert torch.allclose(gradient, model.model.embed_tokens.weight.grad, atol=1e-5)


def test_training_writes_a_folder_that_loads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    lines: list[str] = []
    train(tmp_path / "policy", steps=2, seed=1, threads=1, say=lines.append)
    assert lines[-1].startswith("step 2/2")
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "policy", local_files_only=True)
    assert model.dtype == torch.float32
    assert evaluate(tmp_path / "policy", n=2, max_tokens=8).share_right == 0.0


def test_greedy_episodes_end_with_the_right_answer() -> None:
    report = evaluate(n=24, seed=1234)
    assert report.share_right >= 0.8, report.wrong


def test_sampled_episodes_show_real_trouble() -> None:
    report = evaluate(n=64, seed=5, temperature=1.0)
    assert 0.3 < report.share_right < 1.0
    assert report.noncanonical > 0
