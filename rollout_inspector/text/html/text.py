"""Hostile text as HTML: total escaping, and a glyph beside each invisible character.

The glyph is an empty element that CSS draws *beside* the real character, so a copy of the page is the text itself.
Spaces lie in an element whose background shows them: they are many, and a glyph for each would double the page.
Bytes that are no UTF-8 are drawn in hexadecimal. A character whose bytes lie in several tokens is drawn in the token
of its first byte; the other tokens show their bytes.
"""

import re
from collections.abc import Sequence

import numpy as np

# Characters that get a glyph: controls, format characters (bidi overrides, zero width, BOM, tags), separators,
# unusual spaces, and U+FFFD, which must not look like a byte that is no UTF-8.
_INVISIBLE = (
    "\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xa0\xad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f"
    "\u2028-\u202f\u205f-\u206f\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\uffff\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_TOKEN_CHARACTERS = re.compile(f" +|[&<>\"'\t\r\x00{_INVISIBLE}]")
_RUN_CHARACTERS = re.compile(f"[&<>\"'\t\r\x00{_INVISIBLE}]")
_INVISIBLE_CHARACTERS = re.compile(f"[\n\t\r\x00{_INVISIBLE}]")
_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
_FIXED = {
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    '"': "&quot;",
    "'": "&#x27;",
    "\t": "<b class=t></b>\t",
    # A bare CR would become LF in the parser, a reference stays CR.
    "\r": "<b class=r></b>&#13;",
    # HTML cannot hold NUL at all.
    "\x00": "<b class=z data-x=00>\ufffd</b>",
}


def _character(match: re.Match[str]) -> str:
    char = match[0]
    if char[0] == " ":
        return f"<b>{char}</b>"
    fixed = _FIXED.get(char)
    if fixed is not None:
        return fixed
    # <bdi> limits a bidi control to its own element. Joiners and selectors become visible and have no effect.
    return f"<bdi class=c data-x={ord(char):04X}>{char}</bdi>"


# UTF-8 of Hebrew, Arabic and the other scripts that run from right to left.
_RIGHT_TO_LEFT = re.compile(
    rb"\xd6[\x90-\xbf]|[\xd7-\xdf][\x80-\xbf]|\xe0[\xa0-\xa3]|\xef(?:\xac[\x9d-\xbf]|[\xad-\xb7\xb9-\xbb])"
    rb"|\xf0(?:\x90[\xa0-\xbf]|\x9e[\xa0-\xbb])"
)


def runs_right_to_left(data: bytes) -> bool:
    """Whether some of the text runs from right to left."""
    return _RIGHT_TO_LEFT.search(data) is not None


def text_html(text: str, spaces: bool = False) -> str:
    """Escaped text with glyphs beside invisible characters. ``spaces``: also mark U+0020."""
    escaped = (_TOKEN_CHARACTERS if spaces else _RUN_CHARACTERS).sub(_character, text)
    return escaped.replace("\n", "<b class=n></b>\n")  # lines are many, so each is not a match


def visible_text(text: str) -> str:
    """One line that shows invisible characters in a visible form, for a label. It is not escaped."""
    return _INVISIBLE_CHARACTERS.sub(lambda match: _VISIBLE.get(match[0]) or f"<U+{ord(match[0]):04X}>", text)


def bytes_text(data: bytes) -> str:
    """Bytes as text for a label; a byte that belongs to no character is written as ``<A1>``. It is not escaped."""
    return "".join(f"<{chunk[0]:02X}>" if char is None else char for _, chunk, char in characters(data))


def bytes_html(data: bytes) -> str:
    """Bytes that are no UTF-8: shown in hexadecimal, copied as U+FFFD."""
    return "".join(f"<b class=z data-x={byte:02X}>\ufffd</b>" for byte in data)


def characters(data: bytes) -> list[tuple[int, bytes, str | None]]:
    """``data`` cut into (offset, bytes, character). The character is None for a byte that belongs to no character."""
    pieces: list[tuple[int, bytes, str | None]] = []
    at = 0
    while at < len(data):
        lead = data[at]
        length = 1 if lead < 0x80 else 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
        chunk = data[at : at + length]
        try:
            pieces.append((at, chunk, chunk.decode()))
        except UnicodeDecodeError:
            chunk = data[at : at + 1]
            pieces.append((at, chunk, None))
        at += len(chunk)
    return pieces


def bytes_text_html(data: bytes, spaces: bool = False) -> str:
    """Bytes as escaped text. Stretches that are no UTF-8 are drawn as bytes."""
    try:
        return text_html(data.decode(), spaces)
    except UnicodeDecodeError:
        return "".join(
            bytes_html(chunk) if char is None else text_html(char, spaces) for _, chunk, char in characters(data)
        )


def split_fragments(pieces: Sequence[bytes]) -> list[tuple[str, bool, bool]]:
    """How each token of split characters is drawn: a character stands in the token of its first byte. The HTML; whether
    a character starts in this token and goes on in the next; whether one ends here that started in an earlier token."""
    edges = np.cumsum([0, *(len(piece) for piece in pieces)])
    html = [""] * len(pieces)
    opens, closes = [False] * len(pieces), [False] * len(pieces)
    for offset, chunk, char in characters(b"".join(pieces)):
        first = int(np.searchsorted(edges, offset, side="right")) - 1
        last = int(np.searchsorted(edges, offset + len(chunk) - 1, side="right")) - 1
        html[first] += bytes_html(chunk) if char is None else text_html(char, spaces=True)
        for token in range(first, last):
            opens[token] = True
            closes[token + 1] = True
    return list(zip(html, opens, closes, strict=True))
