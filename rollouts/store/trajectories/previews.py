"""The lines of trajectories for lists, made when steps are stored."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.preview import MAX_LINE, Pieces, Preview, preview_of
from rollout_inspector.streams.trajectory import Ids, Row, Step
from rollout_inspector.text.tokenizers import ByteTable
from rollout_inspector.text.tokenizers.byte_table import special_tokens
from rollouts.store.text import storable_text


def stored_preview(
    steps: Sequence[Step], rows: Sequence[Row] = (), table: ByteTable | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Preview:
    """The lines as the columns ``prompt_line`` and ``answer_line`` hold them."""
    preview = preview_of(steps, rows, None if table is None else pieces_of(table), extra)
    return Preview(*(storable_text(line)[:MAX_LINE] for line in preview))


def pieces_of(table: ByteTable) -> Pieces:
    """Turns ids into texts, cut at control tokens."""

    def pieces(ids: Ids) -> list[str]:
        whole, ends = table.joined(ids)
        control = np.flatnonzero(special_tokens(table, ids))
        # The bytes between two control tokens, and those behind the last one.
        starts = [0, *ends[control].tolist()]
        stops = [*(ends[control - 1] * (control > 0)).tolist(), len(whole)]
        return [whole[a:b].decode("utf-8", "replace") for a, b in zip(starts, stops, strict=True) if b > a]

    return pieces
