"""The sentence above a comparison counts what its table shows, whatever differs."""

import numpy as np
import pytest

from inspector.trajectories.compare.side_by_side import align_texts, compare
from rollout_inspector.streams.align import AlignedGroup
from rollout_inspector.streams.trajectory import plain_tokens
from rollout_inspector.text.html.tokens import painter_of


def words(left: list[int], right: list[int], sampled: bool = False, new: bool = False) -> str:
    """The sentence of two streams of ids."""
    sides = np.array(left, np.int32), np.array(right, np.int32)
    mask = np.ones(len(left), np.bool_) if sampled else None
    groups = align_texts(*sides)
    return compare(*map(plain_tokens, sides), groups, painter_of(None), new, sampled=mask).words


SUMS = (
    "In 4 places: 2 sampled tokens are missing, 1 sampled token is replaced by 1 and 2 tokens are added. The first is "
    "at token 10."
)
A, B, C = list(range(10, 20)), list(range(30, 40)), list(range(50, 60))


@pytest.mark.parametrize(("left", "right", "sentence"), [
    (A, A, "Both sides hold the same 10 tokens."),
    ([], [], "Both sides are empty."),
    ([], A, "The left side is empty: 10 tokens are added."),
    (A[:1], [], "The right side is empty: 1 token is missing."),
    ([*A, 1, 2, *B], [*A, *B], "2 sampled tokens are missing at token 10; the other 10 follow unchanged."),
    ([*A, 1], A, "1 sampled token is missing at the end, from token 10 on."),
    ([*A, *B], [*A, 1, 2, 3, *B], "3 tokens are added at token 10; the other 10 follow unchanged."),
    (A, [*A, 1], "1 token is added at the end."),
    ([*A, 1, 2, *B], [*A, 3, *B], "2 sampled tokens at token 10 are replaced by 1; the other 10 follow unchanged."),
    ([1, *A], [2, *A], "1 sampled token at token 0 is replaced by 1; the other 10 follow unchanged."),
    ([*A, 1, *B, *C], [*A, *B, 2, *C], "1 sampled token is missing at token 10; 1 token is added at token 21."),
    ([*A, 1, 2, *B, *C], [*A, *B, 1, 2, *C], "2 tokens moved from token 10 to token 22."),
    (
        [*A, 1, *B, 2, *C, 3, *A, *B], [*A, *B, 4, *C, *A, 5, 6, *B],
        SUMS,
    ),
])  # fmt: skip
def test_each_shape_of_a_difference(left: list[int], right: list[int], sentence: str) -> None:
    assert words(left, right, sampled=True) == sentence


def test_tokens_that_nobody_knows_as_sampled_are_not_called_so() -> None:
    assert words([*A, 1, *B], [*A, *B]) == "1 token is missing at token 10; the other 10 follow unchanged."


def test_what_a_prompt_adds_at_its_end_is_no_difference() -> None:
    assert words(A, [*A, *B], new=True) == "Both sides hold the same 10 tokens; 10 tokens follow, as new."
    gone = words([*A, 1, *B], [*A, *B, *C], sampled=True, new=True)
    assert gone == "1 sampled token is missing at token 10; the other 10 follow unchanged."


def test_a_mask_that_differs_alone_says_which_side_trains() -> None:
    ids = np.array([*A, *B], np.int32)
    sampled, trained = np.arange(20) >= 10, np.arange(20) >= 12
    groups = [AlignedGroup(0, 10, 0, 10, True), AlignedGroup(10, 12, 10, 12, False), AlignedGroup(12, 20, 12, 20, True)]
    sides = plain_tokens(ids, mask=sampled), plain_tokens(ids, mask=trained)
    less = compare(*sides, groups, painter_of(None), sampled=sampled).words
    assert less == "2 sampled tokens at token 10 are not trained; the other 8 follow unchanged."
    more = compare(*reversed(sides), groups, painter_of(None), sampled=trained).words
    assert more == "2 tokens at token 10 are trained, and were not sampled; the other 8 follow unchanged."
