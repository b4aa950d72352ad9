"""The running stream of one rollout: ids, mask, logprobs and origin grow together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollouts.tito.trajectory import Floats, Ids, Mask, Origin, Origins, Row, ids_array

_FIRST = 256
_NO_LOGPROBS: Floats = np.full(_FIRST, np.nan, dtype=np.float32)
_T = TypeVar("_T", bound=np.generic)


class Buffer:
    """Grows by verbatim completions and by deltas; each append is O(its own length), amortised."""

    def __init__(self) -> None:
        self._n = 0
        self._first_logprob: int | None = None
        self._ids: Ids = np.empty(_FIRST, dtype=np.int32)
        self._origin: Origins = np.empty(_FIRST, dtype=np.uint8)
        # Behind the end these two hold what an unsampled token has.
        self._mask: Mask = np.zeros(_FIRST, dtype=np.bool_)
        self._logprobs: Floats = _NO_LOGPROBS.copy()

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
        self._append(ids, origin, False, logprobs=None)

    def append_delta(self, ids: Ids | Sequence[int], origin: Origin | Origins = Origin.TEMPLATE) -> None:
        """Add what stands between two completions. Raises ``ValueError`` when the lengths disagree."""
        self._append(ids, origin, False, logprobs=None)

    def append_sampled(self, ids: Ids | Sequence[int], logprobs: Floats | Sequence[float] | None = None) -> None:
        """Add a completion verbatim, under the gradient. Raises ``ValueError`` when the lengths disagree."""
        values = None if logprobs is None else np.asarray(logprobs, dtype=np.float32).reshape(-1)
        self._append(ids, Origin.SAMPLED, True, values)

    def cut(self, length: int) -> None:
        """Forget what stands behind the first ``length`` tokens. Raises ``ValueError`` when there are fewer."""
        if not 0 <= length <= self._n:
            raise ValueError(f"cannot cut at {length}: the buffer holds {self._n} tokens")
        self._mask[length : self._n], self._logprobs[length : self._n] = False, np.nan
        self._n = length
        self._ids = self._ids[:length].copy()  # views that were handed out keep what they show
        if self._first_logprob is not None and self._first_logprob >= length:
            self._first_logprob = None

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
            logprobs=None if self._first_logprob is None else self.logprobs,
            origin=self.origin,
            step_indices=tuple(step_indices),
        )

    def _append(
        self, ids: Ids | Sequence[int], origin: Origin | Origins, is_trained: bool, logprobs: Floats | None
    ) -> None:
        # Everything is checked before anything is written, so that a refused append leaves no trace.
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1):
            ids = ids_array(ids)
        n = len(ids)
        if logprobs is not None and len(logprobs) != n:
            raise ValueError(f"{len(logprobs)} logprobs for {n} ids")
        written: int | Origins
        if isinstance(origin, Origin):
            written = int(origin)  # an enumeration is slow to become an array's number
        else:
            written = origin = np.asarray(origin, dtype=np.uint8).reshape(-1)
            if len(origin) != n:
                raise ValueError(f"{len(origin)} origins for {n} ids")
        start, stop = self._n, self._n + n
        if stop > len(self._ids):
            self._grow(stop)
        self._ids[start:stop] = ids
        self._origin[start:stop] = written
        if is_trained:
            self._mask[start:stop] = True
        if logprobs is not None:
            self._logprobs[start:stop] = logprobs
            if self._first_logprob is None:
                self._first_logprob = start
        self._n = stop

    def _grow(self, stop: int) -> None:
        """New arrays, never a resize in place: views that were handed out keep what they show."""
        size = max(stop, 2 * len(self._ids))
        self._ids = _grown(self._ids, self._n, size)
        self._origin = _grown(self._origin, self._n, size)
        self._mask = _grown(self._mask, self._n, size)
        self._mask[self._n :] = False
        self._logprobs = _grown(self._logprobs, self._n, size)
        self._logprobs[self._n :] = np.nan


def _grown(array: NDArray[_T], n: int, size: int) -> NDArray[_T]:
    grown = np.empty(size, dtype=array.dtype)
    grown[:n] = array[:n]
    return grown
