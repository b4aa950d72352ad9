"""Text as a database can hold it."""

from __future__ import annotations

from pathlib import PurePath


def storable_text(value: str) -> str:
    """The text without what a database refuses: U+0000 becomes its picture ``␀``, a lone surrogate becomes ``?``.

    PostgreSQL's text cannot hold U+0000, and a lone surrogate has no UTF-8.
    """
    return value.replace("\0", "␀").encode("utf-8", "replace").decode()


def tidy_name(name: str) -> str:
    """A folder's name from a file's: without the suffix, and with nothing that a path could stumble over."""
    stem = PurePath(name.replace("\\", "/")).name.removesuffix(".zip").removesuffix(".json")
    kept = "".join(letter if letter.isalnum() or letter in "._- " else "-" for letter in stem).strip(". ")[:100]
    return kept or "tokenizer"
