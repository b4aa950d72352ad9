"""Lists of bounded size out of a stream of items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], limit: int, weight: Callable[[T], int] = lambda _: 1) -> Iterator[list[T]]:
    """Consecutive items in lists. A list ends with the item that brings its weight to ``limit``; the last may be light.

    Without ``weight`` every list but the last has ``limit`` items. An item is read when it is asked for, not before.
    """
    batch: list[T] = []
    held = 0
    for item in items:
        batch.append(item)
        held += weight(item)
        if held >= limit:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
