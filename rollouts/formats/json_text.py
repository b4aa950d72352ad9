"""JSON text as it is stored, compared and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec


def canonical_json(value: Any) -> str:
    """JSON text without spaces, keys in their own order. U+0000 and lone surrogates are escaped for the database."""
    try:
        quick = _encode(value)
        if b"null" not in quick:  # a null may stand for a number that is none
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


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
