"""Text as a database can hold it and a page may show it."""

import re
from pathlib import PurePath

_PATH = re.compile(r"(?<![\w.:/<~-])/(?:[^\s'\"/:;,]+/)+([^\s'\":;,]*)")


def storable_text(value: str) -> str:
    """The text without what a database refuses: U+0000 becomes its picture ``␀``, a lone surrogate becomes ``?``.
    PostgreSQL's text cannot hold U+0000, and a lone surrogate has no UTF-8."""
    return value.replace("\0", "␀").encode("utf-8", "replace").decode()


def without_paths(sentence: str) -> str:
    """A sentence for readers of pages: of each path of this machine the last part alone. Addresses stay. Errors of
    libraries name the file that they could not read."""
    return _PATH.sub(r"\1", sentence)


def tidy_name(name: str) -> str:
    """A folder's name from a file's: without the suffix, and with nothing that a path could stumble over."""
    stem = PurePath(name.replace("\\", "/")).name.removesuffix(".zip").removesuffix(".json")
    tidy = "".join(letter if letter.isalnum() or letter in "._- " else "-" for letter in stem).strip(". ")[:100]
    return tidy or "tokenizer"
