"""Text as a database can hold it."""

from __future__ import annotations


def storable_text(value: str) -> str:
    """The text without what a database refuses: U+0000 becomes its picture ``␀``, a lone surrogate becomes ``?``.

    PostgreSQL's text cannot hold U+0000, and a lone surrogate has no UTF-8.
    """
    return value.replace("\0", "␀").encode("utf-8", "replace").decode()
