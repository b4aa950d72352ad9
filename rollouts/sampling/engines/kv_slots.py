"""Keys and values of many sequences in one tensor, one slot each. Live slots come first; finished ones are reused."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import NO_IDS, Ids


@dataclass
class Slot:
    """One row of the tensor, and the ids that its keys and values belong to."""

    ids: Ids = field(default_factory=lambda: NO_IDS)  # A buffer; the first ``length`` ids count.
    length: int = 0
    owner: Any = None  # The live request. None = kept for reuse, or empty.
    used_at: int = 0

    def shared_with(self, prompt: Ids) -> int:
        """How many leading ids of ``prompt`` are already computed here. At least one id is left to compute."""
        return common_prefix(self.ids[: self.length], prompt[:-1])

    def extend(self, values: Ids) -> None:
        """Append ids ``[n]`` whose keys and values are now in the tensor."""
        end = self.length + len(values)
        if end > self.ids.size:
            grown = np.zeros(max(end, 2 * self.ids.size, 256), dtype=np.int32)
            grown[: self.length] = self.ids[: self.length]
            self.ids = grown
        self.ids[self.length : end] = values
        self.length = end


class SlotCache:
    """The cache that a transformers model sees. Rows ``[low, high)`` take part; pads write into the last column."""

    def __init__(self, n_layers: int, n_slots: int, n_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.slots = [Slot() for _ in range(n_slots)]
        self._shape = (n_layers, 2, n_slots, n_heads)
        self._head_dim, self._dtype = head_dim, dtype
        self.capacity = 0
        self._kv = torch.zeros((*self._shape, 0, head_dim), dtype=dtype)
        self.reserve(256)
        self._rows = slice(0, 0)
        self._length = 0
        self._row_index = self._positions = torch.zeros(0, dtype=torch.long)

    def reserve(self, length: int) -> None:
        """Make room for sequences of ``length`` tokens."""
        if length <= self.capacity:
            return
        capacity = max(length, 2 * self.capacity)
        # One more column, for the pads to write into.
        grown = torch.zeros((*self._shape, capacity + 1, self._head_dim), dtype=self._dtype)
        grown[:, :, :, :, : self.capacity] = self._kv[:, :, :, :, : self.capacity]
        self._kv, self.capacity = grown, capacity

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots, their keys and values included."""
        if a == b:
            return
        first, second = self.slots[a], self.slots[b]
        n = max(first.length, second.length)
        keys_of_a = self._kv[:, :, a, :, :n].clone()
        if second.length:
            self._kv[:, :, a, :, :n] = self._kv[:, :, b, :, :n]
        if first.length:
            self._kv[:, :, b, :, :n] = keys_of_a
        self.slots[a], self.slots[b] = second, first

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot into another, which then holds nothing else."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]
        slot = self.slots[target]
        slot.length = 0
        slot.extend(self.slots[source].ids[:length])

    def begin(self, low: int, high: int, positions: Tensor, length: int) -> None:
        """Prepare the next forward over rows ``[low, high)``. ``positions [n, q]`` of the new tokens; -1 = a pad."""
        self._rows = slice(low, high)
        self._row_index = torch.arange(low, high)[:, None]
        self._positions = torch.where(positions < 0, self.capacity, positions)
        self._length = length

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with ``[n, heads, q, dim]``; returns views ``[n, heads, length, dim]``."""
        kept_keys, kept_values = self._kv[layer, 0], self._kv[layer, 1]
        kept_keys[self._row_index, :, self._positions] = keys.transpose(1, 2)
        kept_values[self._row_index, :, self._positions] = values.transpose(1, 2)
        return kept_keys[self._rows, :, : self._length], kept_values[self._rows, :, : self._length]

    def get_seq_length(self, layer: int = 0) -> int:
        return self._length


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention without a copy of the key heads: with one query token a row, the copy takes longer than the rest."""
    n, n_heads, n_queries, head_dim = query.shape
    n_kv_heads, length = key.shape[1], key.shape[2]
    grouped = query.reshape(n, n_kv_heads, -1, head_dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (scaling or head_dim**-0.5)
    if attention_mask is not None:
        by_query = scores.view(n, n_kv_heads, n_heads // n_kv_heads, n_queries, length)
        scores = (by_query + attention_mask[:, :, None]).view_as(scores)
    mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
    return mixed.view(n, n_heads, n_queries, head_dim).transpose(1, 2).contiguous(), None
