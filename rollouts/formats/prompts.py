"""Lines whose prompts repeat: each prompt of a conversation begins with the one before, so only what is new is parsed.

``"prompt_token_ids": [...]`` is cut out of the text before the text is decoded. Bytes that are those of the prompt
before are the same ids; so reading a rollout of N calls is a matter of its new tokens and of comparing bytes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from rollouts.formats import shapes
from rollouts.formats.shapes import BadLine
from rollouts.tito.trajectory import Ids

KEY = "prompt_token_ids"
_QUOTED = f'"{KEY}"'.encode()
_OPENS = re.compile(rb"\s*:\s*\[")


def decode(data: bytes | None, holders: Callable[[Any], Iterable[dict[str, Any]]]) -> Any:
    """:func:`rollouts.formats.shapes.decode`, with arrays of ids in place of the lists of ``prompt_token_ids``.

    ``holders`` gives the objects of the decoded line in which prompts are looked for. When prompts stand anywhere else,
    or anything about one is odd, the line is decoded as any other is, which says what is wrong with it. Raises
    :class:`BadLine`.
    """
    cut = None if data is None else _cut(data)
    if cut is None:
        return shapes.decode(data)
    text, prompts = cut
    with contextlib.suppress(BadLine):  # the whole line says it better
        value = shapes.decode(text)
        if _put_back(value, prompts, holders):
            return value
    return shapes.decode(data)


def _cut(data: bytes) -> tuple[bytes, list[Ids]] | None:
    """The text with the number of a prompt in place of each, and the prompts; None when one cannot be cut out."""
    pieces: list[bytes] = []
    prompts: list[Ids] = []
    done, before = 0, b""
    while (key := data.find(_QUOTED, done)) >= 0:
        opens = _OPENS.match(data, key + len(_QUOTED))
        if opens is None or data[key - 1 : key] == b"\\":
            return None
        start = opens.end()
        stop = data.find(b"]", start)
        if stop < 0:
            return None
        shared = len(before)
        if not (shared and data.startswith(before, start) and data[start + shared : start + shared + 1] in b","):
            shared = 0
        new = _ids(data[start + shared + bool(shared) : stop], not shared)
        if new is None:
            return None
        prompts.append(np.concatenate([prompts[-1], new]) if shared else new)
        pieces += (data[done : start - 1], b"%d" % (len(prompts) - 1))
        before, done = data[start:stop], stop + 1
    if not prompts:
        return None
    return b"".join([*pieces, data[done:]]), prompts


def _ids(text: bytes, may_be_empty: bool) -> Ids | None:
    try:
        values = msgspec.json.decode(b"[%b]" % text)
        return shapes.ids(values, KEY) if values or may_be_empty else None
    except (BadLine, ValueError, RecursionError):
        return None


def _put_back(value: Any, prompts: list[Ids], holders: Callable[[Any], Iterable[dict[str, Any]]]) -> bool:
    """Whether every prompt was found where it belongs."""
    try:
        found = [one for one in holders(value) if type(one.get(KEY)) is int]
    except (AttributeError, KeyError, TypeError):
        return False
    if sorted(one[KEY] for one in found) != list(range(len(prompts))):
        return False
    for one in found:
        one[KEY] = prompts[one[KEY]]
    return True
