"""The running stream of one rollout: ids, mask, logprobs and origin grow together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollouts.tito.trajectory import Floats, Ids, Mask, Origin, Origins, Row, ids_array

_FIRST = 256
T = TypeVar("T", bound=np.generic)


class Buffer:
    """Grows by verbatim completions and by deltas; each append is O(its own length), amortised."""

    def __init__(self) -> None:
        self._n = 0
        self._ids: Ids = np.empty(_FIRST, dtype=np.int32)
        self._mask: Mask = np.empty(_FIRST, dtype=np.bool_)
        self._logprobs: Floats = np.empty(_FIRST, dtype=np.float32)
        self._origin: Origins = np.empty(_FIRST, dtype=np.uint8)
        self._has_logprobs = False

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> Ids:
        """``[n]``, read-only; stays what it is when the buffer grows."""
        view = self._ids[: self._n]
        view.flags.writeable = False
        return view

    @property
    def loss_mask(self) -> Mask:
        """``[n]``: True where a token is under the gradient. A copy."""
        return self._mask[: self._n].copy()

    @property
    def logprobs(self) -> Floats:
        """``[n]``: NaN where nothing was sampled, or where no logprob was given. A copy."""
        return self._logprobs[: self._n].copy()

    @property
    def origin(self) -> Origins:
        """``[n]``: :class:`Origin` of each token. A copy."""
        return self._origin[: self._n].copy()

    def append_prompt(self, ids: Ids | Sequence[int], origin: Origin | Origins = Origin.PROMPT) -> None:
        """Add tokens that nobody trains. Raises ``ValueError`` when ``origin`` has another length than ``ids``."""
        self._append(ids_array(ids), origin, mask=False, logprobs=None)

    def append_delta(self, ids: Ids | Sequence[int], origin: Origin | Origins = Origin.TEMPLATE) -> None:
        """Add what stands between two completions. Raises ``ValueError`` when the lengths disagree."""
        self._append(ids_array(ids), origin, mask=False, logprobs=None)

    def append_sampled(self, ids: Ids | Sequence[int], logprobs: Floats | Sequence[float] | None = None) -> None:
        """Add a completion verbatim, under the gradient. Raises ``ValueError`` when the lengths disagree."""
        values = None if logprobs is None else np.asarray(logprobs, dtype=np.float32).reshape(-1)
        self._append(ids_array(ids), Origin.SAMPLED, mask=True, logprobs=values)

    def freeze(self, upto: int) -> None:
        """Take everything before ``upto`` out of the gradient; who wrote it stays known. Raises ``ValueError``."""
        if not 0 <= upto <= self._n:
            raise ValueError(f"cannot freeze up to {upto}: the buffer holds {self._n} tokens")
        self._mask[:upto] = False

    def to_row(self, step_indices: Sequence[int] = ()) -> Row:
        """The buffer as a training row ``[n]``; ``logprobs`` is None when no completion came with any."""
        return Row(
            ids=self._ids[: self._n].copy(),
            loss_mask=self.loss_mask,
            logprobs=self.logprobs if self._has_logprobs else None,
            origin=self.origin,
            step_indices=tuple(step_indices),
        )

    def _append(self, ids: Ids, origin: Origin | Origins, mask: bool, logprobs: Floats | None) -> None:
        # Everything is checked before anything is written, so that a refused append leaves no trace.
        n = len(ids)
        if logprobs is not None and len(logprobs) != n:
            raise ValueError(f"{len(logprobs)} logprobs for {n} ids")
        if not isinstance(origin, Origin):
            origin = np.asarray(origin, dtype=np.uint8).reshape(-1)
            if len(origin) != n:
                raise ValueError(f"{len(origin)} origins for {n} ids")
        start, stop = self._n, self._n + n
        self._reserve(stop)
        self._ids[start:stop] = ids
        self._mask[start:stop] = mask
        self._logprobs[start:stop] = np.nan if logprobs is None else logprobs
        self._origin[start:stop] = origin
        self._has_logprobs = self._has_logprobs or logprobs is not None
        self._n = stop

    def _reserve(self, n: int) -> None:
        if n <= len(self._ids):
            return
        size = max(n, 2 * len(self._ids))
        self._ids = _grown(self._ids, size)
        self._mask = _grown(self._mask, size)
        self._logprobs = _grown(self._logprobs, size)
        self._origin = _grown(self._origin, size)


def _grown(array: NDArray[T], size: int) -> NDArray[T]:
    # A new array, never a resize in place: views that were handed out keep what they show.
    grown = np.empty(size, dtype=array.dtype)
    grown[: len(array)] = array
    return grown
