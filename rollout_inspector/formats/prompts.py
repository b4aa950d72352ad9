"""Fast reading of lines whose prompts repeat: each prompt begins with the prompt before, so only the rest is parsed.
Lists of numbers (``"prompt_token_ids": [...]``) are cut out of the text before the text is decoded, and parsed alone.
Where a prompt has the same bytes as the prompt before, it has the same ids. So only bytes are compared there."""

import contextlib
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heapreplace
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout_inspector.formats import shapes
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Floats, Ids

PROMPT = "prompt_token_ids"
_OPENS = re.compile(rb"\s*:\s*\[")
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
_floats_decoder = msgspec.json.Decoder(list[float])
Array = NDArray[Any]


def parse_ids(text: bytes) -> Ids:
    """The ids ``[n]`` of a JSON list of token ids. Raises ``ValueError`` for any other text."""
    values = _ids_decoder.decode(text)
    return np.fromiter(values, np.int32, len(values))


def parse_floats(text: bytes) -> Floats:
    """The floats ``[n]`` of a JSON list of 32-bit numbers. Raises ``ValueError`` or ``OverflowError`` else."""
    values = _floats_decoder.decode(text)
    return np.frombuffer(struct.pack(f"<{len(values)}f", *values), np.dtype("<f4"))


Parse = Callable[[bytes], Array]


def decode(
    data: bytes, holders: Callable[[Any], Iterable[dict[str, Any]]], others: Mapping[str, Parse] | None = None
) -> Any:
    """:func:`decode`, with arrays in place of the lists of ``prompt_token_ids`` and of the keys of ``others``.
    ``holders`` returns the objects of the decoded line that may hold these lists. If a list stands anywhere else, the
    line is decoded in the plain way, which says what is wrong. Raises :class:`BadLine`."""
    cut = _cut(data, {PROMPT: parse_ids, **(others or {})})
    if cut is None:
        return shapes.decode(data)
    text, arrays = cut
    with contextlib.suppress(BadLine):  # the whole line says it better
        value = shapes.decode(text)
        if _put_back(value, arrays, holders):
            return value
    return shapes.decode(data)


def _cut(data: bytes, parsers: Mapping[str, Parse]) -> tuple[bytes, list[tuple[str, Array]]] | None:
    """The text with a number in place of each list, and the lists by that number; None = no list was cut. A list that
    cannot be parsed stays in the text."""
    pieces: list[bytes] = []
    arrays: list[tuple[str, Array]] = []
    done = 0
    prompts: list[tuple[bytes, Ids]] = []
    keys = [(b'"%b"' % name.encode(), name) for name in parsers]
    places = sorted((at, key, name) for key, name in keys if (at := data.find(key)) >= 0)
    while places:
        at, key, name = places[0]
        opens = _OPENS.match(data, at + len(key))
        start = at + 1 if opens is None else opens.end()
        stop = data.find(b"]", start)
        if stop < 0 or data[at - 1 : at] == b"\\":
            return None
        if opens is not None:
            text = data[start:stop]
            try:
                array = _longer(text, prompts) if name == PROMPT else parsers[name](b"[%b]" % text)
            except (ValueError, OverflowError, RecursionError):
                pass
            else:
                if name == PROMPT:
                    prompts = [(text, array)]
                elif parsers[name] is parse_ids:
                    prompts = [*prompts[:1], (text, array)]
                pieces += (data[done : start - 1], b"%d" % len(arrays))
                arrays.append((name, array))
                done = start = stop + 1
        if (at := data.find(key, start)) >= 0:
            heapreplace(places, (at, key, name))
        else:
            heappop(places)
    return (b"".join([*pieces, data[done:]]), arrays) if arrays else None


def _longer(text: bytes, known: Sequence[tuple[bytes, Ids]]) -> Ids:
    """The ids of a prompt. Where its bytes begin with ``known`` text (the prompt before, then what was sampled), the
    known ids are taken."""
    parts: list[Ids] = []
    place = 0
    for piece, ids in known:
        end = place + len(piece)
        if not piece or not text.startswith(piece, place) or text[end : end + 1] not in (b"", b","):
            break
        parts.append(ids)
        place = end + 1
        if text.startswith(b" ", place):
            place += 1
    if place <= len(text):
        parts.append(parse_ids(b"[%b]" % text[place:]))
        if place and not len(parts[-1]):
            raise ValueError("a comma and nothing behind it")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _put_back(value: Any, arrays: list[tuple[str, Array]], holders: Callable[[Any], Iterable[dict[str, Any]]]) -> bool:
    """Whether every list was found where it belongs."""
    names = {name for name, _ in arrays}
    try:
        references = [(holder, name) for holder in holders(value) for name in names if type(holder.get(name)) is int]
    except (AttributeError, KeyError, TypeError):
        return False
    if sorted(holder[name] for holder, name in references) != list(range(len(arrays))):
        return False
    if any(arrays[holder[name]][0] != name for holder, name in references):
        return False
    for holder, name in references:
        holder[name] = arrays[holder[name]][1]
    return True
