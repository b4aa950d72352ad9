"""Cuts a stream of items into lists of bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batched(items: Iterable[T], limit: int, weight: Callable[[T], int] = lambda _: 1) -> Iterator[list[T]]:
    """Yields consecutive items in lists. A list ends with the item that brings its weight to ``limit``. Only the last
    list may weigh less. Without ``weight`` each item weighs 1. An item is read when it is needed, not before."""
    batch: list[T] = []
    weight_so_far = 0
    for item in items:
        batch.append(item)
        weight_so_far += weight(item)
        if weight_so_far >= limit:
            yield batch
            batch, weight_so_far = [], 0
    if batch:
        yield batch
