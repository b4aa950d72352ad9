"""The running stream of one rollout: ids, mask, logprobs and origin grow together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollouts.tito.trajectory import Floats, Ids, Mask, Origin, Origins, Row, ids_array

_FIRST = 256


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one append has added."""

    start: int
    stop: int
    origin: Origin | Origins
    is_trained: bool
    logprobs: Floats | None


class Buffer:
    """Grows by verbatim completions and by deltas; each append is O(its own length), amortised."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(_FIRST, dtype=np.int32)
        self._pieces: list[_Piece] = []
        self._frozen = 0

    def __len__(self) -> int:
        return self._pieces[-1].stop if self._pieces else 0

    @property
    def ids(self) -> Ids:
        """``[n]``, read-only; stays what it is when the buffer grows."""
        view = self._ids[: len(self)]
        view.flags.writeable = False
        return view

    @property
    def loss_mask(self) -> Mask:
        """``[n]``: True where a token is under the gradient. A copy."""
        mask: Mask = np.zeros(len(self), dtype=np.bool_)
        for piece in self._pieces:
            if piece.is_trained:
                mask[piece.start : piece.stop] = True
        mask[: self._frozen] = False
        return mask

    @property
    def logprobs(self) -> Floats:
        """``[n]``: NaN where nothing was sampled, or where no logprob was given. A copy."""
        values: Floats = np.full(len(self), np.nan, dtype=np.float32)
        for piece in self._pieces:
            if piece.logprobs is not None:
                values[piece.start : piece.stop] = piece.logprobs
        return values

    @property
    def origin(self) -> Origins:
        """``[n]``: :class:`Origin` of each token. A copy."""
        origin: Origins = np.zeros(len(self), dtype=np.uint8)
        for piece in self._pieces:
            origin[piece.start : piece.stop] = piece.origin
        return origin

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
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot cut at {length}: the buffer holds {len(self)} tokens")
        while self._pieces and self._pieces[-1].stop > length:
            piece = self._pieces.pop()
            n = length - piece.start
            if n > 0:
                origin = piece.origin if isinstance(piece.origin, Origin) else piece.origin[:n]
                logprobs = None if piece.logprobs is None else piece.logprobs[:n]
                self._pieces.append(_Piece(piece.start, length, origin, piece.is_trained, logprobs))
        self._ids = self._ids[: len(self)].copy()  # views that were handed out keep what they show
        self._frozen = min(self._frozen, length)

    def freeze(self, upto: int) -> None:
        """Take everything before ``upto`` out of the gradient; who wrote it stays known. Raises ``ValueError``."""
        if not 0 <= upto <= len(self):
            raise ValueError(f"cannot freeze up to {upto}: the buffer holds {len(self)} tokens")
        self._frozen = max(self._frozen, upto)

    def to_row(self, step_indices: Sequence[int] = ()) -> Row:
        """The buffer as a training row ``[n]``; ``logprobs`` is None when no completion came with any."""
        return Row(
            ids=self._ids[: len(self)].copy(),
            loss_mask=self.loss_mask,
            logprobs=self.logprobs if any(piece.logprobs is not None for piece in self._pieces) else None,
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
        if not isinstance(origin, Origin):
            origin = np.asarray(origin, dtype=np.uint8).reshape(-1)
            if len(origin) != n:
                raise ValueError(f"{len(origin)} origins for {n} ids")
        start, stop = len(self), len(self) + n
        if stop > len(self._ids):
            # A new array, never a resize in place: views that were handed out keep what they show.
            grown = np.empty(max(stop, 2 * len(self._ids)), dtype=np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = ids
        self._pieces.append(_Piece(start, stop, origin, is_trained, logprobs))
