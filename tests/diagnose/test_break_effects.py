"""The interval of a break's effect, on breaks whose effect is known."""

import pytest

from benchmarks.measures.break_effects import CASES, PlantedBreak, measured
from rollout_inspector.streams.figures import paired_difference


@pytest.mark.parametrize("planted", CASES, ids=str)
def test_the_interval_holds_the_planted_effect(planted: PlantedBreak) -> None:
    result = measured(planted)
    assert result.covered >= 0.93
    if planted.effect == pytest.approx(-0.3) and planted.n >= 96:
        assert result.seen >= 0.95
    if not planted.effect:
        assert result.seen <= 0.07


def test_few_equal_pairs_are_not_certain() -> None:
    assert paired_difference([(1.0, 1.0)]) is None
    difference, low, high = paired_difference([(1.0, 1.0)] * 16) or (9.0, 9.0, 9.0)
    assert difference == 0 and low < -0.1 and high > 0.1


def test_the_sign_is_what_the_break_did() -> None:
    difference, low, high = paired_difference([(1.0, 0.0)] * 16) or (9.0, 9.0, 9.0)
    assert difference == -1 and low < -0.9 and high < -0.5


def test_numbers_of_any_size_keep_their_scale() -> None:
    small, large = (
        paired_difference([(n * scale, (n + 5) * scale) for n in range(10)]) or (0.0, 0.0, 0.0) for scale in (10, 1000)
    )
    assert large == pytest.approx([100 * number for number in small], rel=1e-6)
