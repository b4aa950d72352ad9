"""What sampled ids say and no message holds: the text that a parser dropped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids, Mask

_TAG = re.compile(r"<[^<>\s]{1,60}(?:\s[^<>]{0,60})?>|\[/?[A-Z_]{3,}\]")
_WORD = re.compile(r"\w+")
_OF_THE_FORM = {"name", "arguments", "parameters", "function", "functions", "type", "tool", "call", "calls", "id",
                "assistant", "analysis", "commentary", "final", "json", "think", "to", "null",
                "true", "false"}
_ESCAPED = re.compile(r"u[0-9a-f]{4}")
SHORTEST = 3
"""Fewer words in a row are an escape or a word of the form."""

Joined = Callable[[Ids], tuple[bytes, NDArray[np.int64]]]
"""``joined_bytes`` of a codec: the bytes of ids, and for each id ``[n]`` the offset at which its bytes end."""


Stretch = tuple[str, int, int]
"""Sampled words in a row that a message does not hold: their text, and the completion's tokens ``[start, stop)``."""


def holds_all(decoded: str, texts: Iterable[str]) -> bool:
    """Whether a decoded completion, control tokens included, is made of ``texts``, tags and the form of a call.

    Then :func:`unheld` finds nothing in it, and this is cheaper. False says nothing: a word may be spelled otherwise.
    """
    remainder = decoded
    for text in texts:
        start = remainder.find(text)
        stop = start + len(text)
        if start < 0 or _cuts_a_word(remainder, start) or _cuts_a_word(remainder, stop):
            return False
        remainder = f"{remainder[:start]} < {remainder[stop:]}"  # no tag reaches over this mark
    return _words(_TAG.sub(" ", remainder)) <= _OF_THE_FORM


def _cuts_a_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and _WORD.fullmatch(text, at - 1, at + 1) is not None


def unheld_tokens(completion_ids: Ids, is_special: Mask, joined: Joined, held: str) -> list[Stretch]:
    """What a completion ``[C]`` says and a message does not hold, by :func:`unheld`, with its tokens.

    ``is_special`` ``[C]``: its control tokens, which are no part of the text. ``held``: all texts of the message.
    """
    plain = np.flatnonzero(~is_special)
    data, ends = joined(completion_ids[plain])
    # A byte that is no UTF-8 is one character here, so that characters lead back to bytes.
    text = data.decode("utf-8", "surrogateescape")
    stretches, at, n_bytes = list[Stretch](), 0, 0
    for start, stop in unheld(text, held):
        n_bytes += len(text[at:start].encode("utf-8", "surrogateescape"))
        stretch_bytes = text[start:stop].encode("utf-8", "surrogateescape")
        first = int(np.searchsorted(ends, n_bytes, side="right"))
        n_bytes, at = n_bytes + len(stretch_bytes), stop
        last = int(np.searchsorted(ends, n_bytes, side="left"))
        stretches.append((stretch_bytes.decode("utf-8", "replace"), int(plain[first]), int(plain[last]) + 1))
    return stretches


def unheld(decoded: str, held: str) -> list[tuple[int, int]]:
    """The stretches ``[start, stop)`` of a decoded completion whose words a message does not hold, in order.

    ``held``: all texts of the message. Tags and the words that the form of a call writes are left out. A stretch has at
    least three words in a row, or is all that the completion says. Words are compared, not their order.
    """
    if decoded.strip() == held.strip():
        return []
    text = _TAG.sub(lambda match: " " * len(match[0]), decoded)
    held_words = _words(held)
    if _words(text) <= held_words | _OF_THE_FORM:
        return []  # most replies: no word has to be looked at in its place
    words = [match for match in _WORD.finditer(text) if match[0].lower() not in _OF_THE_FORM]
    missing = [not _is_known(text, match, held_words) for match in words]
    if words and all(missing):
        return [(words[0].start(), words[-1].end())]
    spans, first = list[tuple[int, int]](), 0
    for at in range(len(words) + 1):
        if at == len(words) or not missing[at]:
            if at - first >= SHORTEST:
                spans.append((words[first].start(), words[at - 1].end()))
            first = at + 1
    return spans


def _words(text: str) -> set[str]:
    """The words of a text in small letters."""
    if text.isascii():
        return set(_WORD.findall(text.lower()))
    # Another small letter may be two characters, of which one is no part of a word.
    return {word.lower() for word in set(_WORD.findall(text))}


def _is_known(text: str, match: re.Match[str], known: set[str]) -> bool:
    """Whether a word is in the message, also as JSON spells it: ``\\n`` stands before a word, ``\\u00e9`` in one."""
    word = match[0].lower()
    if word in known:
        return True
    start, stop = match.span()
    if text[stop : stop + 2] == "\\u":
        return True
    if start == 0 or text[start - 1] != "\\":
        return False
    return bool(_ESCAPED.match(word)) or (word[0] in "nrtbf" and (len(word) == 1 or word[1:] in known))
