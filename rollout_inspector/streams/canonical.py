"""Checks whether a sampled stream is canonical, and where it is not, finds the stretches that drift."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rollout_inspector.streams.align import AlignedGroup, align_ids, align_same_bytes
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import Ids, Row, Step


@dataclass(frozen=True, eq=False)
class Drift:
    """A stretch of ids that would change if the text were encoded again."""

    start: int
    stop: int  # ``ids[start:stop]`` is the stretch.
    expected_ids: Ids  # The ids that the encoder returns for its text.
    actual_ids: Ids  # ``ids[start:stop]``.
    invalid_utf8: bool = False
    """The stretch holds bytes that are not UTF-8. As text they become U+FFFD, so encoding cannot restore them."""


def canonical_check(ids: Ids, codec: Codec) -> list[Drift]:
    """The stretches in which ``encode(decode(ids))`` differs from ``ids``. Empty = canonical."""
    return canonical_check_batch([ids], codec)[0]


def canonical_check_batch(
    streams: Sequence[Ids], codec: Codec, data: Sequence[bytes] | None = None
) -> list[list[Drift]]:
    """:func:`canonical_check` of each stream, with one call of the encoder. ``data``: the streams' bytes, if known."""
    anchor, anchor_ids = _anchor(codec)
    texts = [
        text_bytes.decode("utf-8", "replace")
        for text_bytes in (bytes_of_each(streams, codec) if data is None else data)
    ]
    encoded = codec.encode_batch([anchor + text for text in texts])
    return [
        _drifts(ids, _without_anchor(again, anchor_ids, text, codec), codec)
        for ids, text, again in zip(streams, texts, encoded, strict=True)
    ]


def bytes_of_each(streams: Sequence[Ids], codec: Codec) -> list[bytes]:
    """The bytes of each stream, gathered in one call."""
    if not streams:
        return []
    data, ends = codec.joined_bytes(np.concatenate(streams))
    at = np.concatenate([[0], ends])[np.cumsum([0, *(len(ids) for ids in streams)])].tolist()
    return [data[start:stop] for start, stop in pairwise(at)]


@lru_cache(maxsize=1)
def _anchor(codec: Codec) -> tuple[str, Ids]:
    """Text before every stream, and its ids. An encoder that adds a space at the start adds it there."""
    probe = codec.encode("a")
    if not b"".join(codec.token_bytes(probe)).startswith(b" "):
        return "", probe[:0]
    return "\n", codec.encode("\n")


def _without_anchor(encoded: Ids, anchor: Ids, text: str, codec: Codec) -> Ids:
    n = len(anchor)
    if not n:
        return encoded
    if len(encoded) >= n and np.array_equal(encoded[:n], anchor):
        return encoded[n:]
    return codec.encode(text)  # the stream's text merged with the anchor


def _drifts(ids: Ids, again: Ids, codec: Codec) -> list[Drift]:
    head = common_prefix(ids, again)
    if head == len(ids) == len(again):
        return []
    pieces = codec.token_bytes(ids)
    # Only the stretch from the first to the last difference has to be aligned.
    tail = common_prefix(ids[head:][::-1], again[head:][::-1])
    middle, right = slice(head, len(ids) - tail), again[head : len(again) - tail]
    drifts = []
    for group in _aligned(ids[middle], pieces[middle], right, codec):
        if group.equal:
            continue
        start, stop = head + group.left_start, head + group.left_stop
        stretch = b"".join(pieces[start:stop])
        drifts.append(
            Drift(start, stop, right[group.right_start : group.right_stop], ids[start:stop], not is_utf8(stretch))
        )
    return drifts


def _aligned(ids: Ids, pieces: list[bytes], again: Ids, codec: Codec) -> list[AlignedGroup]:
    again_pieces = codec.token_bytes(again)
    if b"".join(pieces) == b"".join(again_pieces):
        return align_same_bytes(pieces, again_pieces, ids, again)
    # Half characters, or an encoder that normalises text: left and right do not hold the same bytes.
    return align_ids(ids, again)


def is_utf8(data: bytes) -> bool:
    """Whether bytes are text: every character in them is whole."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


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
