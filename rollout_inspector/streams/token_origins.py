"""Finds who wrote the tokens between two completions, and the stretches of a mask."""

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Mask, Message, Origin, Origins

MEDIA = ("image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video", "video_url")
"""The types of the parts of a content that are media."""
# Storing a plain int in an array is faster than an enumeration.
_TEMPLATE, _OBSERVATION = np.uint8(Origin.TEMPLATE), np.uint8(Origin.OBSERVATION)
_composed = partial(unicodedata.normalize, "NFC")
_QUOTED = (json.JSONEncoder(ensure_ascii=False).encode, json.JSONEncoder().encode)
# What a template writes right after a control token: a role, a channel, a recipient, or just the line end.
_HEADER = re.compile(rb"[ \t]*(?:[A-Za-z][\w.=/:\- ]{0,63})?[ \t]*(?:\r?\n)+|[ \t]*[A-Za-z][\w.=/:\- ]{0,63}(?=\Z)")


def origins_of_text(
    whole: bytes, offsets: Ids, special: Mask | Sequence[bool], new_messages: Sequence[Message] = ()
) -> Origins:
    """TEMPLATE or OBSERVATION for each token of a delta ``[D]``.

    ``whole`` holds the delta's bytes; ``offsets`` ``[D + 1]`` says where each token starts in them
    (:func:`byte_offsets`). The text of each new message is searched in the delta's bytes, in order. Tokens that overlap
    it are observation. Without messages, or when a text is not found (a template may rewrite it), control tokens and
    the role headers after them are template and everything else is observation.
    """
    return origins_of_texts(whole, offsets, special, [len(offsets) - 1], [new_messages])


def origins_of_texts(
    whole: bytes, offsets: Ids, special: Mask | Sequence[bool], stops: Sequence[int],
    new_messages: Sequence[Sequence[Message]],
) -> Origins:
    """:func:`origins_of_text` for joined deltas. Each delta ends at the next of ``stops`` and has separate messages."""
    flags: Mask = np.asarray(special, dtype=np.bool_)
    headers, scaffold = _headers(whole, flags, offsets, stops)
    origins: Origins = np.where(scaffold, _TEMPLATE, _OBSERVATION)
    start = 0
    for stop, own, messages in zip(stops, headers, new_messages, strict=True):
        if messages:
            spans, complete = _find_messages(whole, int(offsets[start]), int(offsets[stop]), own, messages)
            if spans and complete:
                origins[start:stop] = _TEMPLATE
            for first, last in spans:
                first_text = int(offsets.searchsorted(first, side="right")) - 1
                origins[first_text : int(offsets.searchsorted(last, side="left"))] = _OBSERVATION
        start = stop
    return origins


def byte_offsets(pieces: Sequence[bytes]) -> Ids:
    """Where each token starts in the joined bytes, and where the last one ends: ``[n + 1]``."""
    offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces)), out=offsets[1:])
    return offsets  # type: ignore[return-value]


def _headers(
    whole: bytes, special: Mask, offsets: Ids, stops: Sequence[int]
) -> tuple[list[list[tuple[int, int]]], Mask]:
    """By delta, the byte ranges of the header after each control token; and ``[D]``: tokens in headers or control."""
    headers: list[list[tuple[int, int]]] = [[] for _ in stops]
    scaffold = special.copy()
    places = np.flatnonzero(special)
    if not len(places):
        return headers, scaffold
    deltas = np.searchsorted(stops, places, side="right")
    ends = np.asarray(stops).take(deltas)
    starts = offsets.take(places + 1)
    limits = np.minimum(starts + 256, offsets.take(ends))
    np.minimum(limits[:-1], offsets.take(places[1:]), out=limits[:-1])
    edges = offsets.tolist()
    for place, delta, end, start, limit in zip(
        places.tolist(), deltas.tolist(), ends.tolist(), starts.tolist(), limits.tolist(), strict=True
    ):
        match = _HEADER.match(whole, start, limit)
        if match and (stop := match.end()) > start:
            headers[delta].append((start, stop))
            # A token that reaches beyond the header holds text of a message.
            scaffold[place + 1 : bisect_right(edges, stop, place + 1, end + 1) - 1] = True
    return headers, scaffold


def _find_messages(
    whole: bytes, start: int, stop: int, headers: Sequence[tuple[int, int]], messages: Sequence[Message]
) -> tuple[list[tuple[int, int]], bool]:
    """Ranges of message texts in ``whole[start:stop]``, and whether all were found. Assistant messages are skipped."""
    spans: list[tuple[int, int]] = []
    complete, cursor = True, start
    for message in messages:
        if message.get("role") == "assistant":
            continue
        for forms in content_forms(message.get("content")):
            span = _find(whole, cursor, stop, forms, headers)
            if span is None:
                complete = False
                continue
            spans.append(span)
            cursor = span[1]
    return spans, complete


def _find(
    whole: bytes, cursor: int, end: int, forms: Sequence[bytes], headers: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """The place of the earliest form; of several the longest. Inside a role header only if there is no other."""
    inside: tuple[int, int] | None = None
    best: tuple[int, int] | None = None
    for form in forms:
        start = whole.find(form, cursor, end)
        while start >= 0:
            stop = start + len(form)
            if any(a <= start and stop <= b for a, b in headers):
                inside = inside or (start, stop)
                start = whole.find(form, start + 1, end)
                continue
            if best is None or (start, -stop) < (best[0], -best[1]):
                best = (start, stop)
            break
    return best or inside


def content_forms(content: Any, spelled: Callable[[str], str] = _composed) -> Iterator[tuple[bytes, ...]]:
    """For each text of a message's content, the byte forms in which templates write it. Empty texts are left out.
    ``spelled`` says what the tokenizer makes of a text. Without a tokenizer it is the composed form of Unicode."""
    if content is None or (isinstance(content, str) and not content.strip()):
        return
    parts = content if isinstance(content, list | tuple) else None
    # For media a template writes placeholders.
    if parts is not None and all(
        isinstance(part, Mapping) and (isinstance(part.get("text"), str) or part.get("type") in MEDIA) for part in parts
    ):
        for part in parts:
            yield from content_forms(part.get("text"), spelled)
        return
    if isinstance(content, str):
        as_it_is = dict.fromkeys(way for text in (content, spelled(content)) for way in (text, text.strip()))
        texts = [*as_it_is, *(quoted(text) for text in as_it_is for quoted in _QUOTED)]
    else:
        dumped = (*_dumped(content), str(content))
        texts = [*dumped, *map(spelled, dumped)]
    yield tuple(dict.fromkeys(text.encode("utf-8", "replace") for text in texts if text))


def _dumped(value: Any) -> Iterator[str]:
    """The ways in which templates write a value as JSON."""
    for ensure_ascii in (False, True):
        for separators in ((", ", ": "), (",", ":")):
            try:
                yield json.dumps(value, ensure_ascii=ensure_ascii, separators=separators)
            except (TypeError, ValueError, RecursionError):
                return


def mask_runs(mask: Mask) -> list[tuple[int, int]]:
    """The maximal stretches ``[start, stop)`` of a mask ``[T]`` in which it is 1, in order."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
