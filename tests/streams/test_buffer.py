import numpy as np
import pytest

from rollout_inspector.streams.buffer import Buffer
from rollout_inspector.streams.trajectory import Origin


def test_everything_grows_together() -> None:
    buffer = Buffer()
    buffer.append_prompt([1, 2])
    buffer.append_sampled([3, 4], [-0.5, -0.25])
    buffer.append_delta([5, 6], np.array([Origin.TEMPLATE, Origin.OBSERVATION], dtype=np.uint8))
    buffer.append_sampled([7])
    row = buffer.to_row((0, 1))
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert row.origin is not None and row.origin.tolist() == [0, 0, 1, 1, 2, 3, 1]
    assert row.logprobs is not None
    assert np.isnan(row.logprobs[[0, 1, 4, 5, 6]]).all() and row.logprobs[[2, 3]].tolist() == [-0.5, -0.25]
    assert row.step_indices == (0, 1)


def test_a_row_without_any_logprobs_says_so() -> None:
    buffer = Buffer()
    buffer.append_sampled([1, 2])
    assert buffer.to_row().logprobs is None


def test_what_is_refused_leaves_no_trace() -> None:
    buffer = Buffer()
    buffer.append_prompt([1])
    with pytest.raises(ValueError, match="1 logprobs for 2 ids"):
        buffer.append_sampled([2, 3], [-0.5])
    with pytest.raises(ValueError, match="3 origins for 1 ids"):
        buffer.append_delta([2], np.zeros(3, dtype=np.uint8))
    with pytest.raises(OverflowError):
        buffer.append_prompt([2**31])
    assert buffer.ids.tolist() == [1] and len(buffer) == 1


def test_ids_that_were_handed_out_stay_what_they_are() -> None:
    buffer = Buffer()
    buffer.append_prompt([1, 2])
    held = buffer.ids
    buffer.append_sampled(list(range(10_000)))
    assert held.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 9


def test_cutting_forgets_the_tail_and_nothing_else() -> None:
    buffer = Buffer()
    buffer.append_prompt([1, 2])
    buffer.append_sampled([3, 4, 5], [-1.0, -2.0, -3.0])
    held = buffer.ids
    buffer.cut(4)
    buffer.append_delta([6], [Origin.OBSERVATION])
    row = buffer.to_row()
    assert row.ids.tolist() == [1, 2, 3, 4, 6] and held.tolist() == [1, 2, 3, 4, 5]
    assert row.loss_mask.tolist() == [False, False, True, True, False] and row.logprobs is not None
    assert row.logprobs[[2, 3]].tolist() == [-1.0, -2.0] and np.isnan(row.logprobs[[0, 1, 4]]).all()
    buffer.cut(2)
    assert buffer.to_row().logprobs is None and len(buffer) == 2
    with pytest.raises(ValueError, match="holds 2 tokens"):
        buffer.cut(3)
