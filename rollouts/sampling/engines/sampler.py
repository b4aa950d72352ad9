"""Draws tokens from logits, each request by its own rules and with its own random numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollouts.sampling.engines.protocol import Sampling

_BLOCK = 64


class Draws:
    """The uniform random numbers of one request. With a seed they are the same in every batch."""

    def __init__(self, seed: int | None) -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed % 2**63)
        self._block: list[float] = []
        self._next = 0

    def next(self) -> float:
        if self._next == len(self._block):
            self._block = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
            self._next = 0
        self._next += 1
        return self._block[self._next - 1]


Alternatives = tuple[list[int], list[float], float]
"""The likeliest ids at a place, at most as many as there are, their log-probabilities, and the entropy in nats."""


def draw(
    logits: Tensor, samplings: list[Sampling], draws: list[Draws], forced: Sequence[int | None] = ()
) -> list[tuple[int, float, Alternatives | None]]:
    """One token for each row of ``logits [n, V]``, and its log-probability under the distribution it was drawn from.

    Also the alternatives under that distribution, where the request asks for some. ``forced``: of each row the token
    that it takes in place of a drawn one; None = draw.

    The order is vLLM's: temperature, min_p, top_k, top_p. A greedy row (temperature 0) takes the likeliest token; its
    log-probability is that of the model's unchanged distribution.
    """
    logits = logits.float()
    temperatures = [item.temperature or 1.0 for item in samplings]
    if any(value != 1.0 for value in temperatures):
        logits = logits / torch.tensor(temperatures, dtype=torch.float32)[:, None]
    for row, sampling in enumerate(samplings):
        if sampling.temperature and (sampling.min_p or sampling.top_k or sampling.top_p < 1):
            logits[row] = _cut(logits[row], sampling)
    log_probabilities = torch.log_softmax(logits, dim=-1)
    # The inverse of the cumulative distribution, in double precision: one uniform number decides a token.
    cumulative = torch.cumsum(log_probabilities.double().exp(), dim=-1)
    uniform = torch.tensor([item.next() for item in draws], dtype=torch.float64)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, uniform, right=True)[:, 0]
    greedy = torch.tensor([item.temperature == 0 for item in samplings])
    ids = torch.where(greedy, logits.argmax(dim=-1), tokens.clamp_(max=logits.shape[-1] - 1))
    for row, token in enumerate(forced):
        ids[row] = ids[row] if token is None else token
    chosen = log_probabilities.gather(1, ids[:, None])[:, 0]
    return [
        (item, logprob, _alternatives(log_probabilities[row], n) if (n := samplings[row].alternatives) else None)
        for row, (item, logprob) in enumerate(zip(ids.tolist(), chosen.tolist(), strict=True))
    ]


def _alternatives(row: Tensor, n: int) -> Alternatives:
    """The ``n`` likeliest tokens of log-probabilities ``[V]``, and their entropy."""
    top = torch.topk(row, min(n, row.numel()))
    entropy = -(row.double().exp() * row.double()).nan_to_num(nan=0.0).sum()  # 0 * log 0 is 0
    return top.indices.tolist(), top.values.tolist(), max(float(entropy), 0.0)


def _cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """One row in which every token that must not be drawn is at minus infinity."""
    logits = logits.clone()
    if sampling.min_p:
        probabilities = torch.softmax(logits, dim=-1)
        logits[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    if 0 < sampling.top_k < logits.numel():
        logits[logits < torch.topk(logits, sampling.top_k).values[-1]] = -torch.inf
    if sampling.top_p < 1:
        ordered, order = torch.sort(logits)
        cumulative = torch.softmax(ordered, dim=-1).cumsum(dim=-1)
        drop = cumulative <= 1 - sampling.top_p
        drop[-1] = False
        logits[order[drop]] = -torch.inf
    return logits
