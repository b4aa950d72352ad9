"""Assistant masks from ``{% generation %}``: what ``transformers`` makes of them, and what the model really sampled."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Mask


class OffsetCodec(Protocol):
    """An encoder that tells which characters each id came from (``LoadedTokenizer``)."""

    def encode_offsets(self, text: str) -> tuple[Ids, list[tuple[int, int]]]: ...


def transformers_mask(codec: OffsetCodec, text: str, spans: Sequence[tuple[int, int]]) -> Mask:
    """The mask ``[T]`` that ``return_assistant_tokens_mask`` makes of these spans, its overrun included. Where the last
    character of a span lies in no token's offsets (or in token 0), ``transformers`` runs on to the end of the row."""
    ids, offsets = codec.encode_offsets(text)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, stop in spans:
        first = _token_of(offsets, start)
        last = _token_of(offsets, stop - 1)
        if first is None:
            break
        mask[first : last + 1 if last else len(ids)] = True
    return mask


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order. Spans that touch become one, and empty spans are left out."""
    merged_spans: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged_spans and start == merged_spans[-1][1]:
            merged_spans[-1] = (merged_spans[-1][0], stop)
        elif stop > start:
            merged_spans.append((start, stop))
    return merged_spans


def exact_mask(codec: OffsetCodec, text: str, spans: Sequence[tuple[int, int]]) -> Mask:
    """The mask ``[T]`` of the tokens that lie wholly inside a span."""
    ids, offsets = codec.encode_offsets(text)
    mask = np.zeros(len(ids), dtype=np.bool_)
    for n, (start, stop) in enumerate(offsets):
        mask[n] = stop > start and any(a <= start and stop <= b for a, b in spans)
    return mask


def overlap_mask(codec: OffsetCodec, text: str, spans: Sequence[tuple[int, int]]) -> Mask:
    """The mask ``[T]`` of the tokens that share a character with a span."""
    _, offsets = codec.encode_offsets(text)
    return np.array([any(a < stop and start < b for a, b in spans) for start, stop in offsets], dtype=np.bool_)


def overrun(codec: OffsetCodec, text: str, spans: Sequence[tuple[int, int]]) -> int:
    """How many tokens ``transformers`` puts under the gradient that lie in no span."""
    mask = transformers_mask(codec, text, spans)
    return int(np.sum(mask & ~overlap_mask(codec, text, spans)))


def _token_of(offsets: Sequence[tuple[int, int]], char: int) -> int | None:
    for n, (start, stop) in enumerate(offsets):
        if start <= char < stop:
            return n
    return None
