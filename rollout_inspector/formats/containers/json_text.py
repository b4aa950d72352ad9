"""JSON text as it is stored, compared and written."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec


def canonical_json(value: Any) -> str:
    """JSON text without spaces, keys in their own order. U+0000 and lone surrogates are escaped for the database."""
    try:
        quick = _encode(value)
        if not _NULL.search(quick):  # a null may stand for NaN or infinity
            return quick.decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=_plain)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


_NULL = re.compile(rb"null(?<![^:\[,]null)")  # as a value; a literal in front is found fast
_encode = msgspec.json.Encoder(enc_hook=_plain).encode

MAX_DEPTH = 64  # Levels of nested objects and lists. Copying deeper values would exceed Python's recursion limit.


def json_problem(value: Any) -> str:
    """Why a parsed JSON value cannot be stored, as the end of a sentence about it; empty = it can."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, float) and not math.isfinite(item):
                return "holds NaN or an infinite number, which JSON does not know"
            if isinstance(item, str) and not _is_text(item):
                return "holds U+0000 or half a character"
            if isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                below += item
        if not below:
            return ""
        level = below
    return f"is nested more than {MAX_DEPTH} deep"


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False
