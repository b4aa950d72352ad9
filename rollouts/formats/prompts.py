"""Lines whose prompts repeat: each prompt of a conversation begins with the one before, so only what is new is parsed.

Lists of numbers (``"prompt_token_ids": [...]``) are cut out of the text before the text is decoded, and parsed by
themselves. Bytes of a prompt that are those of the prompt before are the same ids; so reading a rollout of N calls is a
matter of its new tokens and of comparing bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollouts.formats import shapes
from rollouts.formats.shapes import BadLine
from rollouts.tito.trajectory import Floats, Ids

PROMPT = "prompt_token_ids"
_OPENS = re.compile(rb"\s*:\s*\[")
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]])
_floats_decoder = msgspec.json.Decoder(list[float])
Array = NDArray[Any]


def parse_ids(text: bytes) -> Ids:
    """A JSON list of token ids. Raises ``ValueError`` for any other."""
    values = _ids_decoder.decode(text)
    return np.fromiter(values, np.int32, len(values))


def parse_floats(text: bytes) -> Floats:
    """A JSON list of numbers that fit into 32 bits. Raises ``ValueError`` for any other."""
    return shapes.floats(_floats_decoder.decode(text), "")


Parse = Callable[[bytes], Array]


def decode(
    data: bytes | None, holders: Callable[[Any], Iterable[dict[str, Any]]], others: Mapping[str, Parse] | None = None
) -> Any:
    """:func:`rollouts.formats.shapes.decode`, with arrays in place of the lists of ``prompt_token_ids`` and of the keys
    of ``others``.

    ``holders`` gives the objects of the decoded line in which they are looked for. When one stands anywhere else, or
    anything is odd, the line is decoded as any other is, which says what is wrong with it. Raises :class:`BadLine`.
    """
    cut = None if data is None else _cut(data, {PROMPT: parse_ids, **(others or {})})
    if cut is None:
        return shapes.decode(data)
    text, arrays = cut
    with contextlib.suppress(BadLine):  # the whole line says it better
        value = shapes.decode(text)
        if _put_back(value, arrays, holders):
            return value
    return shapes.decode(data)


def _cut(data: bytes, parsers: Mapping[str, Parse]) -> tuple[bytes, list[tuple[str, Array]]] | None:
    """The text with a number in place of each list, and the lists by that number; None when there is none to cut.

    A list that cannot be parsed stays in the text.
    """
    pieces: list[bytes] = []
    arrays: list[tuple[str, Array]] = []
    done, before, prompt = 0, b"", None
    places = {name: data.find(b'"%b"' % name.encode()) for name in parsers}
    while found := [(at, name) for name, at in places.items() if at >= 0]:
        key, name = min(found)
        opens = _OPENS.match(data, key + len(name) + 2)
        start = key + 1 if opens is None else opens.end()
        stop = data.find(b"]", start)
        if stop < 0 or data[key - 1 : key] == b"\\":
            return None
        if opens is not None:
            try:
                if name == PROMPT:
                    array = prompt = _longer(data, start, stop, before, prompt)
                    before = data[start:stop]
                else:
                    array = parsers[name](data[start - 1 : stop + 1])
            except (ValueError, RecursionError):
                pass
            else:
                pieces += (data[done : start - 1], b"%d" % len(arrays))
                arrays.append((name, array))
                done = start = stop + 1
        for other, at in places.items():
            if 0 <= at < start:
                places[other] = data.find(b'"%b"' % other.encode(), start)
    return (b"".join([*pieces, data[done:]]), arrays) if arrays else None


def _longer(data: bytes, start: int, stop: int, before: bytes, prompt: Ids | None) -> Ids:
    """The prompt ``data[start:stop]``; what it begins with is taken from the prompt before where it is the same."""
    shared = len(before)
    if prompt is None or not shared or not data.startswith(before + b",", start):
        return parse_ids(data[start - 1 : stop + 1])
    new = parse_ids(b"[%b]" % data[start + shared + 1 : stop])
    if not len(new):
        raise ValueError("a comma and nothing behind it")
    return np.concatenate([prompt, new])


def _put_back(value: Any, arrays: list[tuple[str, Array]], holders: Callable[[Any], Iterable[dict[str, Any]]]) -> bool:
    """Whether every list was found where it belongs."""
    names = {name for name, _ in arrays}
    try:
        found = [(one, name) for one in holders(value) for name in names if type(one.get(name)) is int]
    except (AttributeError, KeyError, TypeError):
        return False
    if sorted(one[name] for one, name in found) != list(range(len(arrays))):
        return False
    if any(arrays[one[name]][0] != name for one, name in found):
        return False
    for one, name in found:
        one[name] = arrays[one[name]][1]
    return True
