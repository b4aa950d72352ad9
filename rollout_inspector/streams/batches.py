"""Cuts a stream of items into lists of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], limit: int, weight: Callable[[T], int] = lambda _: 1) -> Iterator[list[T]]:
    """Yields consecutive items in lists. A list ends with the item that brings its weight to ``limit``.

    Only the last list may weigh less. Without ``weight`` each item weighs 1. An item is read when it is needed, not
    before.
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
