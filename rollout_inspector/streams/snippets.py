"""Snippets of text and ids for sentences. No character is cut in half, and an ellipsis marks each cut."""

import re
import unicodedata
from collections.abc import Sequence

from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.trajectory import Ids

_JOINER = "\u200d"
_TOKEN = re.compile(r"<[^<>\s]{1,40}>")  # The form of a control token.


def quoted(text: str, most: int = 60) -> str:
    """A text in quotes, with control characters escaped. A long text ends after a word, then an ellipsis."""
    head = clipped(text, most)
    return f"{head!r} …" if len(head) < len(text) else repr(text)


def quoted_or_nothing(text: str, most: int = 60) -> str:
    """The text as :func:`quoted` returns it; the word ``nothing`` for an empty text."""
    return quoted(text, most) if text else "nothing"


def clipped(text: str, most: int) -> str:
    """The start of a text, about ``most`` characters. Control tokens stay whole; the cut is at a blank if possible."""
    if len(text) <= most:
        return text
    stop = _whole(text, most)
    space = max(text.rfind(blank, 0, stop + 1) for blank in " \n\t")
    stop = space if space > most // 2 else stop
    token = _TOKEN.match(text, max(text.rfind("<", 0, stop), 0))
    if token is not None and token.end() > stop:
        return text[: token.start() or token.end()]
    return text[:stop]


def _whole(text: str, place: int) -> int:
    """The nearest place at or before ``place`` that does not cut a character that a reader sees."""
    while 0 < place < len(text) and _joined(text[place - 1], text[place]):
        place -= 1
    return place


def _joined(before: str, behind: str) -> bool:
    """Whether two code points form one character: marks, variation selectors, skin tones, joiners, pairs of flags."""
    if behind == _JOINER or before == _JOINER or unicodedata.category(behind) in ("Mn", "Mc", "Me"):
        return True
    return "\U0001f3fb" <= behind <= "\U0001f3ff" or all(
        "\U0001f1e6" <= char <= "\U0001f1ff" for char in (before, behind)
    )


def contrast(one: str, other: str, most: int = 60) -> tuple[str, str]:
    """Two texts in quotes, each from a little before their first difference."""
    n = common_length(one, other)
    start = max(n - 16, 0)
    while start > 0 and n - start < 32 and _is_word(one[start - 1]) and _is_word(one[start : start + 1]):
        start -= 1
    start = _whole(one, start)
    return _side(one, start, most), _side(other, start, most)


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _side(text: str, start: int, most: int) -> str:
    return f"… {quoted(text[start:], most)}" if start and text else quoted_or_nothing(text, most)


def counted(n: int, what: str) -> str:
    """`1 id`, `2 ids`."""
    return f"{n} {what}{'s' * (n != 1)}"


def listed(ids: Ids | Sequence[int], most: int = 8) -> str:
    """Ids as a list. A long list shows its first ids and its length."""
    first = ", ".join(str(int(token)) for token in ids[:most])
    return f"[{first}]" if len(ids) <= most else f"[{first}, … {len(ids)} in all]"


def window_text(data: bytes, cut_before: bool, cut_behind: bool) -> str:
    """The text of a window of tokens. At a cut, half a character is dropped and an ellipsis is written."""
    start, stop = 0, len(data)
    if cut_before:
        while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
            start += 1
    if cut_behind:
        lead = next(
            (i for i in range(len(data) - 1, max(len(data) - 5, start) - 1, -1) if data[i] & 0xC0 != 0x80), None
        )
        if lead is not None and data[lead] >= 0xC0 and len(data) - lead < _length(data[lead]):
            stop = lead
    return "…" * cut_before + data[start:stop].decode("utf-8", "replace") + "…" * cut_behind


def _length(lead: int) -> int:
    """How many bytes a character has, by its first byte."""
    return 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
