"""How far two gradients of a model lie apart, exactly or over its last layers. Run in the process of an engine."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_inspector.diagnose.loss_weights.damage import DamageCase
from rollout_inspector.streams.trajectory import Ids

MAX_EXACT = 1_500_000_000
"""Parameters of a model whose whole gradient is computed: three vectors of it stand in memory."""
MAX_TOKENS = 32_768  # Of a stream: a backward pass keeps what each layer computed for each token.
MAX_KEPT = 16_384  # Tokens of a trajectory up to which what each layer computed is kept from one pass to the next.
LAST_LAYERS = 2  # Layers that stand for a larger model.
MAX_SHARES = 50  # Findings that get a share of their own, those with the most tokens first. Each costs a backward pass.
ROUNDING = 1e-12  # Of the square of a norm: float32 cannot tell a gradient that is smaller than this part from zero.


def measure(case: DamageCase, model: Any, layers: int | None = None) -> dict[str, Any]:
    """Compare both gradients. ``layers``: over the last so many layers; None = exactly, where the model fits.

    ``cosine``, ``relative_error`` and ``norm_ratio`` are None where a gradient is zero. ``shares``: number of a finding
    -> its share of the difference, 0 = what none explains; they sum to 1. ``layers``: those used, empty = all.
    ``norms``: for each row ``[T]`` the norm of each token's contribution to the gradient of the output layer.
    """
    parameters, words = _parameters(model, layers)
    try:
        model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        return _measured(case, model, parameters, words)
    finally:
        model.requires_grad_(True)


def _parameters(model: Any, layers: int | None) -> tuple[list[Tensor], str]:
    parameters = list(model.parameters())
    if layers is None and sum(parameter.numel() for parameter in parameters) <= MAX_EXACT:
        return parameters, ""
    stack = max((part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=len)
    last = list(stack)[-(layers or LAST_LAYERS) :]
    words = f"the last {len(last)} of {len(stack)} layers"
    return [parameter for layer in last for parameter in layer.parameters()], words


def _measured(case: DamageCase, model: Any, parameters: Sequence[Tensor], layers: str) -> dict[str, Any]:
    with torch.set_grad_enabled(sum(map(len, case.sequences)) <= MAX_KEPT):
        passes = [_forward(model, ids, case.temperature) for ids in case.sequences]
    scores = [np.append(np.float32(np.nan), logprobs.detach().cpu().numpy()) for logprobs, _ in passes]
    gradients = partial(_gradients, case, model, parameters, [logprobs for logprobs, _ in passes])
    sampled, by_finding, of_rows = case.weights(scores)
    norms = [
        np.append(0.0, passes[n][1].cpu().numpy() * np.abs(weights[1:])).astype(np.float32)
        for weights, (_, n, *_) in zip(of_rows, case.rows, strict=True)
    ]
    difference = [np.sum(parts, axis=0) for parts in zip(*by_finding.values(), strict=True)]
    own, apart = gradients([sampled, difference or [np.zeros(len(part)) for part in sampled]])
    shares = dict.fromkeys(list(by_finding)[:MAX_SHARES], 1.0)
    square = _dot(apart, apart)
    if len(by_finding) > 1 and square:
        for number in shares:
            shares[number] = _dot(gradients([by_finding[number]])[0], apart) / square
    if len(by_finding) > MAX_SHARES:
        shares[0] = 1 - sum(share for number, share in shares.items() if number)
    size, across = _dot(own, own) ** 0.5, _dot(own, apart)
    row_square = size**2 + 2 * across + square
    row_size = row_square**0.5 if row_square > ROUNDING * size**2 else 0.0
    cosine = (size**2 + across) / (size * row_size) if size and row_size else None
    return {
        "cosine": None if cosine is None else max(-1.0, min(cosine, 1.0)),
        "relative_error": square**0.5 / size if size else None,
        "norm_ratio": row_size / size if size else None,
        "shares": shares if size and square else {},
        "layers": layers,
        "norms": norms,
    }


def _gradients(
    case: DamageCase, model: Any, parameters: Sequence[Tensor], kept: Sequence[Tensor], weights: Sequence[Sequence[Any]]
) -> list[list[Tensor]]:
    """For each list of weights, ``[T]`` of each sequence, the gradient of the weighted log-probabilities. ``kept``: the
    log-probabilities of each sequence, with their graph where there was memory for it."""
    sums = [[torch.zeros_like(parameter) for parameter in parameters] for _ in weights]
    for n, ids in enumerate(case.sequences):
        used = [k for k, of_sequences in enumerate(weights) if of_sequences[n].any()]
        if not used:
            continue
        logprobs = kept[n] if kept[n].requires_grad else _forward(model, ids, case.temperature)[0]
        for k in used:
            loss = (torch.from_numpy(weights[k][n][1:]).to(logprobs) * logprobs).sum()
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            for total, part in zip(sums[k], parts, strict=True):
                total += part
    return sums


def _forward(model: Any, ids: Ids, temperature: float) -> tuple[Tensor, Tensor]:
    """The log-probabilities ``[T - 1]`` behind the first token, and the norms of their output layer's gradients."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    states: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    try:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1] / temperature
    finally:
        hook.remove()
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens[1:, None])[:, 0]
    with torch.no_grad():
        squares = logprobs.exp().square().sum(-1) - 2 * chosen.exp() + 1
        norms = squares.clamp(min=0).sqrt() * states[0][0, :-1].float().norm(dim=-1) / temperature
    return chosen, norms


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right, strict=True))
