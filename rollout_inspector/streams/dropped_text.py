"""What sampled ids say and no message holds: the text that a parser dropped."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids, Mask

_TAG = re.compile(r"<[^<>\s]{1,60}(?:\s[^<>]{0,60})?>|\[/?[A-Z_]{3,}\]")
_BLANK = re.compile("\0+")
_HEADER = re.compile(r'(?<=\0)\s*\w+(?:\s+[\w.-]{1,40}="[^"\0]{0,200}")+\s*(?=\0)')
r"""A name with attributes between two tags or control tokens, all of whose letters are ``\0`` here. It is no text."""
_PLAIN = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))")
_WORD = re.compile(rf"(?:{_ESCAPE.pattern}|\w)+")
_OF_THE_FORM = {"name", "arguments", "parameters", "function", "functions", "type", "tool", "call", "calls", "id",
                "assistant", "analysis", "commentary", "final", "json", "think", "to", "null",
                "true", "false"}
SHORTEST = 3  # Fewer words in a row are an escape or a word of the form.

Joined = Callable[[Ids], tuple[bytes, NDArray[np.int64]]]
"""``joined_bytes`` of a codec: the bytes of ids, and for each id ``[n]`` the offset at which its bytes end."""


Stretch = tuple[str, int, int]
"""Sampled words in a row that a message does not hold: their text, and the completion's tokens ``[start, stop)``."""


def holds_all(decoded: str, texts: Iterable[str]) -> bool:
    """Whether a decoded completion, control tokens included, is made of ``texts``, tags and the form of a call. Then
    :func:`unheld` finds nothing in it, and this is cheaper. False says nothing: a word may be spelled otherwise."""
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
    """What a completion ``[C]`` says and a message does not hold, by :func:`unheld`, with its tokens. ``is_special``
    ``[C]``: its control tokens, which are no part of the text. ``held``: all texts of the message."""
    data, ends = joined(completion_ids)
    values = np.frombuffer(data, np.uint8).copy()
    values[np.repeat(is_special, np.diff(ends, prepend=0))] = 0  # words beside a control token are two
    # A byte that is no UTF-8 is one character here, so that characters lead back to bytes.
    text = values.tobytes().decode("utf-8", "surrogateescape")
    if not unheld(text.replace("\0", ""), held):
        return []  # a decode that skips control tokens joins the words beside them
    stretches, at, n_bytes = list[Stretch](), 0, 0
    for start, stop in unheld(text, held):
        n_bytes += len(text[at:start].encode("utf-8", "surrogateescape"))
        stretch_bytes = text[start:stop].encode("utf-8", "surrogateescape")
        first = int(np.searchsorted(ends, n_bytes, side="right"))
        n_bytes, at = n_bytes + len(stretch_bytes), stop
        last = int(np.searchsorted(ends, n_bytes, side="left"))
        stretches.append((_BLANK.sub(" ", stretch_bytes.decode("utf-8", "replace")), first, last + 1))
    return stretches


def unheld(decoded: str, held: str) -> list[tuple[int, int]]:
    r"""The stretches ``[start, stop)`` of a decoded completion whose words a message does not hold, in order.

    ``held``: all texts of the message. Each letter of a control token in ``decoded`` is ``\0``. Tags, their attributes
    and the words that the form of a call writes are left out. A stretch has at least three words in a row, or is all
    that the completion says. Words are compared, not their order.
    """
    if held.strip() in (decoded.strip(), decoded.replace("\0", "").strip()):
        return []
    text = _TAG.sub(lambda match: "\0" * len(match[0]), decoded)
    text = _HEADER.sub(lambda match: " " * len(match[0]), text)
    held_words = _words(held)
    if _words(text) <= held_words | _OF_THE_FORM:
        return []  # most replies: no word has to be looked at in its place
    words = [span for span in _word_spans(text) if not _plain(text[slice(*span)]) <= _OF_THE_FORM]
    missing = [not _is_known(text, *span, held_words) for span in words]
    if words and all(missing):
        return [(words[0][0], words[-1][1])]
    spans, first = list[tuple[int, int]](), 0
    for at in range(len(words) + 1):
        if at == len(words) or not missing[at]:
            if at - first >= SHORTEST:
                spans.append((words[first][0], words[at - 1][1]))
            first = at + 1
    return spans


@cache
def _is_mark(letter: str) -> bool:
    """Whether a character is a mark or an invisible sign, which is part of a word."""
    return unicodedata.category(letter) in ("Mn", "Mc", "Me", "Cf")


def _word_spans(text: str) -> list[tuple[int, int]]:
    joined = text if text.isascii() else "".join("_" if _is_mark(letter) else letter for letter in text)
    return [match.span() for match in _WORD.finditer(joined)]


def _words(text: str) -> set[str]:
    """The words of a text in one form (:func:`_plain`)."""
    if text.isascii() and "\\" not in text:
        return set(_PLAIN.findall(text.lower()))
    return {plain for word in {text[start:stop] for start, stop in _word_spans(text)} for plain in _plain(word)}


def _plain(word: str) -> set[str]:
    """A word in small letters, without accents and widths; JSON escapes are read, so it may be several or none."""
    if "\\" in word:
        word = _ESCAPE.sub(lambda match: chr(int(match[1] or match[2], 16)), word)
        word = word.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if not word.isascii():
        word = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", word).casefold())
        word = "".join(letter for letter in word if not _is_mark(letter))
    return set(_PLAIN.findall(word.lower()))


def _is_known(text: str, start: int, stop: int, known: set[str]) -> bool:
    """Whether a word is in the message, also as JSON spells it: ``\\n`` stands before a word."""
    if _plain(text[start:stop]) <= known:
        return True
    return text[start - 1 : start] == "\\" and text[start] in "nrtbf" and _plain(text[start + 1 : stop]) <= known
