"""What follows from the likeliest tokens at a place, against the whole distribution."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from rollout_inspector.streams import alternatives
from rollout_inspector.streams.trajectory import Step, ids_array

LOGITS = arrays(np.float64, (3, 12), elements=st.floats(-30, 30))


@given(LOGITS, st.integers(1, 12))
def test_the_bound_is_below_the_entropy_and_meets_it_with_all_tokens(logits: np.ndarray, k: int) -> None:
    logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    logprobs -= logits.max(1, keepdims=True)
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    order = np.argsort(-logprobs, axis=1)
    ordered = np.take_along_axis(logprobs, order, 1).astype(np.float32)
    bound = alternatives.entropy_at_least((order[:, :k].astype(np.int32), ordered[:, :k]))
    assert (bound <= entropy + 1e-4).all()
    if k == 12:
        np.testing.assert_allclose(bound, entropy, atol=1e-4)
    behind = alternatives.behind_likeliest((order[:, :k].astype(np.int32), ordered[:, :k]), ordered[:, 4])
    np.testing.assert_allclose(behind, ordered[:, 0] - ordered[:, 4], atol=1e-6)


def test_the_bound_counts_the_mass_that_is_left() -> None:
    half = np.log(np.array([[0.5, 0.25]], dtype=np.float32))
    # The quarter that is left may be one more token: then the distribution is (1/2, 1/4, 1/4).
    assert alternatives.entropy_at_least((np.zeros((1, 2), np.int32), half))[0] == pytest.approx(1.0397208)
    # A place that is not filled says that there is no other token.
    cut = np.array([[np.log(0.5), np.log(0.5), -np.inf], [-np.inf] * 3], dtype=np.float32)
    bound = alternatives.entropy_at_least((np.zeros((2, 3), np.int32), cut))
    assert bound[0] == pytest.approx(np.log(2)) and np.isnan(bound[1])


def test_entries_in_any_order_become_flat_arrays() -> None:
    ids, logprobs = alternatives.packed([[(7, -2.0), (3, -0.5)], [], [(9, -0.1)]]) or pytest.fail("nothing")
    assert ids.tolist() == [3, 7, 0, 0, 9, 0] and ids.dtype == np.int32 and logprobs.dtype == np.float32
    assert logprobs.tolist() == [-0.5, -2.0, -np.inf, -np.inf, np.float32(-0.1), -np.inf]
    found = alternatives.unpacked(ids, logprobs, 3)
    assert found is not None and found[0].shape == (3, 2)
    behind = alternatives.behind_likeliest(found, np.array([-2.0, -1.0, -0.1], np.float32))
    assert behind[0] == 1.5 and np.isnan(behind[1]) and behind[2] == 0
    assert alternatives.packed([[], []]) is None and alternatives.unpacked(ids, logprobs, 4) is None


@pytest.mark.parametrize(
    ("ids", "logprobs", "entropy", "words"),
    [
        ([1, 2, 3, 4], [-1.0] * 4, [0.5, 0.5], ""),
        (None, None, None, ""),
        ([1, 2, 3, 4], None, None, "belong together"),
        ([1, 2, 3, 4], [-1.0] * 3, None, "4 alternative_ids have 3"),
        ([1, 2, 3], [-1.0] * 3, None, "do not divide among 2"),
        ([1] * 2002, [-1.0] * 2002, None, "has 1001 alternatives"),
        (None, None, [0.5], "entropy has 1 values for 2"),
    ],
)
def test_arrays_that_do_not_fit_are_a_sentence(
    ids: list[int] | None, logprobs: list[float] | None, entropy: list[float] | None, words: str
) -> None:
    def floats(values: list[float] | None) -> np.ndarray | None:
        return None if values is None else np.array(values, np.float32)

    step = Step(
        ids_array([1]), ids_array([5, 6]), entropy=floats(entropy), alternative_logprobs=floats(logprobs),
        alternative_ids=None if ids is None else ids_array(ids),
    )
    found = alternatives.problem(step)
    assert words in found and bool(found) == bool(words)
    if not words:
        assert alternatives.count(step) == (2 if ids else 0)
