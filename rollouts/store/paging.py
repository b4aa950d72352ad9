"""Cursors of lists: the values of the last item, opaque to whoever sends them back."""

import binascii
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from rollout_inspector.refusal import Refusal

T = TypeVar("T")
ListPart = tuple[list[T], str | None]
"""Part of a list, and the cursor of the next part; None on the last one."""
MAX_CURSOR = 200
MAX_KEY = 2**63 - 1


def cursor_of(name: str, *values: Any) -> str:
    """The cursor behind an item of the list ``name``. Values: whole numbers and moments."""
    plain = [value.isoformat() if isinstance(value, datetime) else value for value in values]
    return urlsafe_b64encode(json.dumps([name, *plain]).encode()).decode().rstrip("=")


def cut_part(name: str, items: list[T], limit: int, values: Callable[[T], tuple[Any, ...]]) -> ListPart[T]:
    """The first ``limit`` of the items found, one more of which says that a part follows. ``values``: of a cursor."""
    more = len(items) > limit
    return items[:limit], cursor_of(name, *values(items[limit - 1])) if more else None


def read_cursor(text: str, name: str, *kinds: type) -> list[Any] | None:
    """The values of a cursor; None for an empty text. Raises :class:`Refusal` for a cursor of another list."""
    if not text:
        return None
    try:
        values = json.loads(urlsafe_b64decode(text[:MAX_CURSOR] + "=" * (-len(text[:MAX_CURSOR]) % 4)))
        if not isinstance(values, list) or values[:1] != [name] or len(values) != len(kinds) + 1:
            raise ValueError
        return [_value(value, kind) for value, kind in zip(values[1:], kinds, strict=True)]
    except (binascii.Error, ValueError, TypeError, RecursionError, OverflowError) as error:
        sentence = "This cursor belongs to no list here. Send `next` of the part before, or leave the cursor out."
        raise Refusal(sentence, field="cursor") from error


def _value(value: Any, kind: type) -> datetime | int:
    if kind is datetime:
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError
        return moment
    if type(value) is int and kind is int and 0 <= value <= MAX_KEY:
        return value
    raise ValueError
