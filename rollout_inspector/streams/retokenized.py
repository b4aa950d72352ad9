"""What encoding the text of whole streams again would change: of each completion, and of each row."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_inspector.streams.canonical import Drift, canonical_check_batch
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import Ids, Row, Step

MAX_TOKENS = 300_000  # The most tokens of a row that are encoded at once.


@dataclass(frozen=True, eq=False)
class EncodedAgain:
    """The stretches of one stream that change when its text is encoded again."""

    step: int | None  # The step whose completion it is; None = it is a row.
    row: int | None
    ids: Ids
    drifts: Sequence[Drift]  # Empty = the stream is canonical.


def rows_again(
    steps: Sequence[Step], rows: Sequence[Row], merged: Sequence[Sequence[int]], codec: Codec
) -> list[EncodedAgain]:
    """Encode the text of each row again. ``merged``: the steps of each row that follows from them, without ``rows``. A
    row of more than ``MAX_TOKENS`` tokens is left out, and so are all where the tokenizer fails on a text."""
    streams = [row.ids for row in rows] or [steps[chain[-1]].stream for chain in merged]
    streams_checked = [(index, ids) for index, ids in enumerate(streams) if 0 < len(ids) <= MAX_TOKENS]
    try:
        checks = canonical_check_batch([ids for _, ids in streams_checked], codec)
    except ValueError:  # the codec says so of a text that it cannot encode
        return []
    return [
        EncodedAgain(None, index, ids, drifts) for (index, ids), drifts in zip(streams_checked, checks, strict=True)
    ]
