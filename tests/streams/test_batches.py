import pytest

from rollout_inspector.streams.batches import batched


@pytest.mark.parametrize(
    ("items", "limit", "expected"),
    [([], 2, []), ([1, 2, 3], 2, [[1, 2], [3]]), ([1, 2, 3, 4], 2, [[1, 2], [3, 4]]), ([7], 1, [[7]])],
)
def test_a_batch_has_so_many_items(items: list[int], limit: int, expected: list[list[int]]) -> None:
    assert list(batched(items, limit)) == expected


def test_a_batch_ends_with_the_item_that_makes_it_heavy_enough() -> None:
    assert list(batched([1, 1, 5, 2, 2], 4, lambda one: one)) == [[1, 1, 5], [2, 2]]
    assert list(batched([9, 0, 1], 4, lambda one: one)) == [[9], [0, 1]]


def test_items_are_read_when_they_are_asked_for() -> None:
    items = iter(range(10))
    batches = batched(items, 2)
    assert next(batches) == [0, 1] and next(items) == 2
