from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollout_inspector.streams.align import (
    AlignedGroup, align_ids, align_same_bytes, fold, place_in_row, sampled_instead
)
from rollout_inspector.streams.trajectory import Row, Step, ids_array

ids = st.lists(st.integers(0, 4), max_size=40)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    stops = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(stops)]


def grouped(left: list[bytes], right: list[bytes]) -> list[AlignedGroup]:
    numbers = {piece: number for number, piece in enumerate({*left, *right})}
    left_ids, right_ids = (ids_array([numbers[piece] for piece in side]) for side in (left, right))
    return align_same_bytes(left, right, left_ids, right_ids)


def test_groups_end_where_both_have_a_cut() -> None:
    groups = grouped([b"H", b"AVING", b" x", b" y"], [b"HAV", b"ING", b" x", b" y"])
    assert groups == [AlignedGroup(0, 2, 0, 2, False), AlignedGroup(2, 4, 2, 4, True)]


def test_equal_bytes_under_another_id_are_no_equal_tokens() -> None:
    groups = align_same_bytes([b"<e>", b"a"], [b"<e>", b"a"], ids_array([1, 2]), ids_array([9, 2]))
    assert groups == [AlignedGroup(0, 1, 0, 1, False), AlignedGroup(1, 2, 1, 2, True)]


def test_tokens_without_bytes_are_not_lost() -> None:
    groups = grouped([b"a", b"", b"b", b""], [b"a", b"b"])
    assert groups[0] == AlignedGroup(0, 1, 0, 1, True)
    assert groups[-1].left_stop == 4 and groups[-1].right_stop == 2 and not groups[-1].equal


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="align_ids"):
        grouped([b"a"], [b"b"])


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)), st.lists(st.integers(0, 60)))
def test_same_bytes_groups_cover_both_sides(text: bytes, a: list[int], b: list[int]) -> None:
    left, right = cut(text, a), cut(text, b)
    at_left = at_right = 0
    for group in grouped(left, right):
        assert (group.left_start, group.right_start) == (at_left, at_right)
        at_left, at_right = group.left_stop, group.right_stop
        one, other = left[group.left_start : at_left], right[group.right_start : at_right]
        assert b"".join(one) == b"".join(other)
        assert (one == other) == group.equal
    assert (at_left, at_right) == (len(left), len(right))


@given(ids, ids)
def test_id_groups_cover_both_sides(a: list[int], b: list[int]) -> None:
    at_left = at_right = 0
    before = None
    for group in align_ids(ids_array(a), ids_array(b)):
        assert (group.left_start, group.right_start) == (at_left, at_right)
        at_left, at_right = group.left_stop, group.right_stop
        same = a[group.left_start : at_left] == b[group.right_start : at_right]
        assert same if group.equal else not same
        assert group.equal != before
        before = group.equal
    assert (at_left, at_right) == (len(a), len(b))


def test_long_streams_are_aligned_by_what_occurs_once() -> None:
    left = np.random.default_rng(0).integers(0, 1000, 20_000).astype(np.int32)
    right = np.concatenate([left[:100], [5, 6], left[105:9000], left[9500:15_000], [7] * 3000, left[15_000:]])
    groups = align_ids(left, right.astype(np.int32))
    assert [(g.left_stop - g.left_start, g.right_stop - g.right_start) for g in groups if not g.equal] == [
        (5, 2), (500, 0), (0, 3000),
    ]


def test_a_gap_beyond_the_bound_stays_whole() -> None:
    left = np.zeros(5000, dtype=np.int32)
    right = np.ones(5000, dtype=np.int32)
    assert align_ids(left, right) == [AlignedGroup(0, 5000, 0, 5000, False)]


def test_folding_keeps_context_where_a_difference_is() -> None:
    groups = [AlignedGroup(0, 50, 0, 50, True), AlignedGroup(50, 51, 50, 53, False), AlignedGroup(51, 60, 53, 62, True)]
    folded = fold(groups, context=4)
    assert folded == [
        AlignedGroup(0, 46, 0, 46, True, is_folded=True),
        AlignedGroup(46, 50, 46, 50, True),
        groups[1],
        AlignedGroup(51, 55, 53, 57, True),
        AlignedGroup(55, 60, 57, 62, True, is_folded=True),
    ]
    assert fold(groups, context=50) == groups
    assert fold(groups, context=4, least=46) == groups
    assert fold(groups, context=4, least=45) == [*folded[:3], groups[2]]


def test_the_place_of_what_a_row_trains_instead() -> None:
    first = Step(ids_array([1, 2]), ids_array([10, 11, 12, 13, 9]))
    second = Step(ids_array([1, 2, 10, 30, 13, 9, 3]), ids_array([20, 21, 9]))
    ids = ids_array([1, 2, 10, 30, 13, 9, 3, 22, 9])
    row = Row(ids, np.isin(ids, [10, 30, 13, 9, 22]), step_indices=(0, 1))
    steps = (first, second)
    assert sampled_instead(steps, row, 3, 4).tolist() == [11, 12]
    assert sampled_instead(steps, row, 7, 8).tolist() == [20, 21]
    assert not len(sampled_instead(steps, row, 3, 5))
    # Offsets of a step are those of its own stream.
    assert [place_in_row(steps, row, 0, start, start + 1) for start in (2, 3, 5)] == [(2, 3), (3, 4), (4, 5)]
    assert place_in_row(steps, row, 1, 7, 9) == (7, 8)
    assert place_in_row(steps, row, 1, 3, 4) == (3, 4)
    assert place_in_row(steps, replace(row, step_indices=(0,)), 1, 3, 4) is None
