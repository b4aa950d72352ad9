"""Trains the demo policy from random weights: ``manage.py train_demo_policy``."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from rollouts.sampling.demo_policy import MODEL_DIR, STEPS
from tools.demo_policy.batches import Batch, batches, render
from tools.demo_policy.dialogues import SYSTEMS, random_dialogue
from tools.demo_policy.tokenizer import ENDOFTEXT, IM_END, MODEL_MAX_LENGTH, save_tokenizer, train_tokenizer

BATCH_SIZE = 48
PEAK_RATE = 2e-3
CHECKPOINT_EVERY = 300
N_TOKENIZER_DIALOGUES = 6000
PROSE = Path(__file__).with_name("prose.txt")


def train(
    output: Path = MODEL_DIR, steps: int = STEPS, seed: int = 0, threads: int = 2, say: Callable[[str], None] = print,
) -> None:
    """Build the tokenizer, train the model and write both to ``output``. Takes about 20 minutes on two cores."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    save_tokenizer(tokenizer, output)
    model = new_model(tokenizer)
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens")
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=PEAK_RATE, total_steps=max(steps, 2), pct_start=0.1
    )
    model.train()
    started = time.monotonic()
    recent: list[float] = []
    for step, batch in enumerate(batches(tokenizer, steps, BATCH_SIZE, seed), start=1):
        loss = batch_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.item())
        if step % 25 == 0 or step == steps:
            minutes = (time.monotonic() - started) / 60
            say(f"step {step}/{steps}  loss {sum(recent) / len(recent):.4f}  {minutes:.1f} min")
            recent.clear()
        if step % CHECKPOINT_EVERY == 0 or step == steps:
            save_model(model, output)


def build_tokenizer(seed: int) -> Tokenizer:
    """The tokenizer, learned from rendered dialogues and from a page of prose for the words that dialogues lack."""
    rng = random.Random(f"demo policy tokenizer {seed}")
    conversations = []
    for _ in range(N_TOKENIZER_DIALOGUES):
        system = rng.choice(SYSTEMS)
        opening = [] if system is None else [{"role": "system", "content": system}]
        conversations.append(opening + random_dialogue(rng).messages)
    # Twice, because the tokenizer learns only what it meets twice.
    return train_tokenizer([*render(conversations), *[PROSE.read_text()] * 2])


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """An untrained model of about 1.8 million parameters."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MODEL_MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(ENDOFTEXT),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the tokens under the loss mask.

    The common prefix is run once. All sequences share its keys and values, gradients included.
    """
    ids, loss_mask = torch.from_numpy(batch.ids), torch.from_numpy(batch.loss_mask)
    size, n_prefix = ids.shape[0], len(batch.prefix)
    cache = DynamicCache(config=model.config)
    model.model(input_ids=torch.from_numpy(batch.prefix)[None], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(size)
    attention = torch.cat([torch.ones(size, n_prefix, dtype=torch.bool), torch.from_numpy(batch.real)], dim=1)
    hidden = model.model(
        input_ids=ids, past_key_values=cache, attention_mask=attention.long(), use_cache=True
    ).last_hidden_state
    targets = loss_mask[:, 1:]
    logits = model.lm_head(hidden[:, :-1][targets])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][targets])


def save_model(model: Qwen3ForCausalLM, output: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors``. Each file is replaced as a whole."""
    scratch = output / ".writing"
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(scratch)
    for path in scratch.iterdir():
        path.chmod(0o644)
        os.replace(path, output / path.name)
    scratch.rmdir()
