"""A file that is one JSON array, or objects over several lines each, cut up without being held: each part is a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|$)")
"""How such a file begins: an array of objects, the first of them perhaps on the next line."""
# Outside a string only these matter, commas between elements alone; inside one, the quote that ends it and the
# backslash that hides a quote.
_DEEP = re.compile(rb'["\[\]{}]')
_OUTSIDE = re.compile(rb'["\[\]{},]')
_INSIDE = re.compile(rb'["\\]')


def elements(pieces: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """Each element's bytes, None for one longer than ``limit``. What breaks off or follows the end comes as it is.

    ``pieces`` may be cut anywhere.
    """
    held = bytearray()
    depth, in_string, skip, too_long = 0, False, False, False
    found = 0
    ended = False

    def element() -> bytes | None:
        nonlocal too_long
        whole = None if too_long else bytes(held).strip()
        held.clear()
        too_long = False
        return whole

    for piece in filter(None, pieces):
        at = kept = 0
        if skip:  # the backslash was the last byte of the piece before
            at, skip = 1, False
        while not ended:
            match = (_INSIDE if in_string else _DEEP if depth > 1 else _OUTSIDE).search(piece, at)
            if match is None:
                break
            byte, at = piece[match.start()], match.end()
            if byte == 0x22:
                in_string = not in_string
            elif byte == 0x5C:
                at += 1
                skip = at > len(piece)
            elif byte in b"[{":
                depth += 1
                if depth == 1:
                    kept = at
            elif byte in b"]}":
                depth -= 1
                ended = depth == 0
                if ended:
                    held += piece[kept : match.start()]
                    last = element()
                    if last is None or last or found:
                        yield last
                    kept = at
            elif depth == 1:
                held += piece[kept : match.start()]
                yield element()
                found += 1
                kept = at
        held += piece[kept:]
        if len(held) > limit:
            too_long = True
            held.clear()
    rest = element()
    if rest or rest is None or (not ended and depth == 1 and found):
        yield rest


def objects(pieces: Iterable[bytes], limit: int) -> Iterator[bytes | None]:
    """Each object that stands at the top, one behind the other, None for one longer than ``limit``.

    What is no object comes with the object behind it, or at the end. ``pieces`` may be cut anywhere.
    """
    held = bytearray()
    depth, in_string, skip, too_long = 0, False, False, False
    for piece in filter(None, pieces):
        at, kept = int(skip), 0
        skip = False
        while match := (_INSIDE if in_string else _DEEP).search(piece, at):
            byte, at = piece[match.start()], match.end()
            if byte == 0x22:
                in_string = not in_string
            elif byte == 0x5C:
                at += 1
                skip = at > len(piece)
            elif byte in b"[{":
                depth += 1
            else:
                depth = max(depth - 1, 0)
                if not depth:
                    held += piece[kept:at]
                    kept = at
                    yield None if too_long or len(held) > limit else bytes(held).strip()
                    held.clear()
                    too_long = False
        held += piece[kept:]
        if len(held) > limit:
            too_long = True
            held.clear()
    if too_long or held.strip():
        yield None if too_long else bytes(held).strip()
