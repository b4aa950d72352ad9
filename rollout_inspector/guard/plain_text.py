"""Text that cannot move a cursor: what a file, a path or a model says, fit for a terminal and a report."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def plain(text: str) -> str:
    """Text without what moves a cursor, turns the direction of writing or breaks XML: each becomes ``\\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def line_of(text: str) -> str:
    """The same on one line."""
    return plain(text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t"))
