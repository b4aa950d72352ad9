"""Makes a Qwen3 model of a real size with random weights, so that nothing has to be downloaded.

With random weights the stop token is hardly ever drawn, so no turn would end. Dimension 0 of every embedding is
therefore a constant that survives to the output. There it serves as the bias that the architecture lacks. The bias
makes the stop token as likely as wanted, and ids that the tokenizer lacks are never drawn.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.sampling.demo_policy import MODEL_DIR


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str


FULL = Shape(1024, 3072, 28, 16, 8, 128, 151_936, "bfloat16")
"""The shape of Qwen3-0.6B with a separate output layer: 0.75 billion parameters."""
SMALL = Shape(64, 192, 2, 4, 2, 32, 1_536, "float32")
"""For the CPU build, which only exercises the code."""

_CONSTANT = 8.0
_SPREAD = 1.5
"""Standard deviation of the logits."""


def make_model(folder: Path, shape: Shape, mean_tokens: int, seed: int = 0) -> int:
    """Write a model with the demo policy's tokenizer into ``folder`` and return its number of parameters.

    ``mean_tokens``: the mean length of a completion that ends with the stop token.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MODEL_DIR / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(getattr(torch, shape.dtype))
    with torch.no_grad():
        _shape_logits(model, len(tokenizer), tokenizer.eos_token_id, mean_tokens)
    model.save_pretrained(folder)
    return int(sum(weights.numel() for weights in model.parameters()))


def _shape_logits(model: Any, n_tokens: int, stop_id: int, mean_tokens: int) -> None:
    import torch

    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.normal_(0.0, 1.0)
    embeddings[:, 0] = _CONSTANT
    for layer in model.model.layers:
        # Attention averages over many positions, so its output is small. With a gain the past counts in what follows.
        for weights, gain in ((layer.self_attn.o_proj.weight, 8.0), (layer.mlp.down_proj.weight, 2.0)):
            weights.normal_(0.0, gain / math.sqrt(layers * weights.shape[1]))
            weights[0] = 0.0
    output.normal_(0.0, _SPREAD / math.sqrt(hidden))
    output[:, 0] = 0.0
    output[stop_id] = 0.0
    # How the constant reaches the output, and how much the other tokens weigh, is measured on random ids.
    ids = torch.randint(0, n_tokens, (4, 64))
    hidden_states = model.model(ids).last_hidden_state.reshape(-1, hidden).float()
    constant = float(hidden_states[:, 0].mean())
    others = float((hidden_states @ output[:n_tokens].float().T).logsumexp(-1).mean())
    output[n_tokens:, 0] = -40.0 / constant
    output[stop_id, 0] = (others - math.log(max(1, mean_tokens - 1))) / constant
