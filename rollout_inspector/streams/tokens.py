"""A stretch of a row, as it is drawn and as it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from rollout_inspector.streams.trajectory import Floats, Ids, Mask, Origins


@dataclass(frozen=True, eq=False)
class Tokens:
    """A stretch of one row. Arrays are all ``[n]``; ``start`` is the row offset of the first."""

    start: int
    ids: Ids
    origin: Origins
    loss_mask: Mask
    logprobs: Floats | None = None
    """NaN for a token that was not sampled, or beyond the end of the recorded values; None: nothing was recorded."""
    step_index: np.ndarray | None = None
    """int32; -1 when the step is not known."""
    n_tokens: int = 0
    """Tokens of the whole row."""
    origin_known: bool = True
    """False: nobody recorded the origins, and ``origin`` is guessed from the loss mask, only for colours."""
    columns: dict[str, Floats] = field(default_factory=dict)
    """What a trainer or an engine told beside the tokens; NaN where a column has no value."""

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def stop(self) -> int:
        """The row offset behind the last token."""
        return self.start + len(self)

    def slice(self, start: int, stop: int) -> Tokens:
        """The tokens with row offsets ``[start, stop)``."""
        part = slice(max(start - self.start, 0), max(stop - self.start, 0))
        return replace(
            self, start=self.start + part.start, ids=self.ids[part], origin=self.origin[part],
            loss_mask=self.loss_mask[part], logprobs=None if self.logprobs is None else self.logprobs[part],
            step_index=None if self.step_index is None else self.step_index[part],
            columns={name: values[part] for name, values in self.columns.items()},
        )


def plain_tokens(ids: Ids, start: int = 0, mask: Mask | None = None) -> Tokens:
    """Ids of which only the loss mask may be known; the first stands at offset ``start``."""
    n = len(ids)
    return Tokens(start, ids, np.zeros(n, np.uint8), np.zeros(n, np.bool_) if mask is None else mask)
