"""The running stream of one rollout: ids, mask, logprobs and origin grow together or not at all."""

from collections.abc import Sequence

import numpy as np

from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Origin, Origins, Row, ids_array

_FIRST = 1024
_Part = tuple[int, int | Origins, bool, Floats | None]
"""For a part of the stream: where it ends, who wrote it, whether it is trained, its logprobs."""


class Buffer:
    """A stream that grows by completions and deltas, each append in amortised O(its length). Arrays form on demand."""

    def __init__(self) -> None:
        self._n = 0
        self._ids: Ids = NO_IDS
        self._parts: list[_Part] = []

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> Ids:
        """The ids ``[n]``, read-only. The array does not change when the buffer grows."""
        view = self._ids[: self._n]
        view.flags.writeable = False
        return view

    def append_prompt(self, ids: Ids | Sequence[int]) -> None:
        """Add the tokens of a prompt, which are not trained."""
        self._append(ids, Origin.PROMPT, False, logprobs=None)

    def append_delta(self, ids: Ids | Sequence[int], origin: Origin | Origins = Origin.TEMPLATE) -> None:
        """Add the tokens between two completions. Raises ``ValueError`` when the lengths disagree."""
        self._append(ids, origin, False, logprobs=None)

    def append_sampled(self, ids: Ids | Sequence[int], logprobs: Floats | Sequence[float] | None = None) -> None:
        """Add a completion verbatim, under the gradient. Raises ``ValueError`` when the lengths disagree."""
        values = None if logprobs is None else np.asarray(logprobs, dtype=np.float32).reshape(-1)
        self._append(ids, Origin.SAMPLED, True, values)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens only. Raises ``ValueError`` when there are fewer."""
        if not 0 <= length <= self._n:
            raise ValueError(f"cannot cut at {length}: the buffer holds {self._n} tokens")
        while self._parts and self._starts_at(-1) >= length:
            self._parts.pop()
        if self._parts:
            start = self._starts_at(-1)
            _, origin, is_trained, logprobs = self._parts.pop()
            kept_slice = slice(0, length - start)
            origin = origin if isinstance(origin, int) else origin[kept_slice]
            self._parts.append((length, origin, is_trained, None if logprobs is None else logprobs[kept_slice]))
        self._n = length
        self._ids = self._ids[:length].copy()  # views that were returned keep their content

    def to_row(self, step_indices: Sequence[int] = ()) -> Row:
        """The buffer as a training row ``[n]``: mask 1 on completions, logprobs NaN on tokens without one. ``logprobs``
        is None when no completion has any."""
        loss_mask: Mask = np.zeros(self._n, dtype=np.bool_)
        origins: Origins = np.empty(self._n, dtype=np.uint8)
        logprobs: Floats | None = None
        start = 0
        for stop, origin, is_trained, values in self._parts:
            origins[start:stop] = origin
            if is_trained:
                loss_mask[start:stop] = True
            if values is not None:
                if logprobs is None:
                    logprobs = np.full(self._n, np.nan, dtype=np.float32)
                logprobs[start:stop] = values
            start = stop
        return Row(self._ids[: self._n].copy(), loss_mask, logprobs, origins, step_indices=tuple(step_indices))

    def _starts_at(self, index: int) -> int:
        return self._parts[index - 1][0] if len(self._parts) + index > 0 else 0

    def _append(
        self, ids: Ids | Sequence[int], origin: Origin | Origins, is_trained: bool, logprobs: Floats | None
    ) -> None:
        # Everything is checked before anything is written, so a refused append changes nothing.
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1):
            ids = ids_array(ids)
        n = len(ids)
        if logprobs is not None and len(logprobs) != n:
            raise ValueError(f"{len(logprobs)} logprobs for {n} ids")
        written: int | Origins
        if isinstance(origin, Origin):
            written = int(origin)  # storing a plain int in an array is faster than an enumeration
        else:
            written = origin = np.asarray(origin, dtype=np.uint8).reshape(-1)
            if len(origin) != n:
                raise ValueError(f"{len(origin)} origins for {n} ids")
        start, stop = self._n, self._n + n
        if stop > len(self._ids):
            # A new array, never a resize in place: views that were returned keep their content.
            grown = np.empty(max(_FIRST, 2 * stop), dtype=np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:stop] = ids
        self._parts.append((stop, written, is_trained, logprobs))
        self._n = stop
