"""When a run is above a limit, and what the alarm says."""

import math
from typing import Any

import pytest

from rollout_inspector.diagnose.alarm_rules import (
    DEFAULTS, FIRST_STEPS, MIN_GAP, MIN_GROUPS, MIN_TRAJECTORIES, TITLES, AlarmFigure, AlarmStep, Raised,
    alarm_sentence, find_raised, percent, value_of
)


def steps(values: list[Any], of: int = 20, **more: Any) -> list[AlarmStep]:
    return [AlarmStep(step, of, broken=value, **more) for step, value in enumerate(values)]


def gaps(values: list[float | None]) -> list[AlarmStep]:
    return [AlarmStep(step, 1, gap=value) for step, value in enumerate(values)]


def test_a_share_above_its_limit_is_raised_at_its_first_step_and_a_share_at_the_limit_is_not() -> None:
    found = find_raised(AlarmFigure.BROKEN, "", 0.1, steps([0, 2, 3, 0, 9, 9, 1]))
    assert found == Raised(first_step=2, last_step=5, n_steps=3, worst_step=4, worst=0.45, baseline=None)
    assert find_raised(AlarmFigure.BROKEN, "", 0.1, steps([0, 2, 2])) is None
    assert find_raised(AlarmFigure.BROKEN, "", 0.1, []) is None


def test_steps_may_come_in_any_order_and_need_not_be_close() -> None:
    one = [AlarmStep(900, 20, broken=20), AlarmStep(4, 20, broken=5), AlarmStep(100, 20)]
    assert find_raised(AlarmFigure.BROKEN, "", 0.1, one) == Raised(4, 900, 2, 900, 1.0, None)


def test_a_small_step_is_checked_by_no_share() -> None:
    for n in (0, 1, MIN_TRAJECTORIES - 1):
        assert find_raised(AlarmFigure.BROKEN, "", 0.1, steps([n], of=n)) is None
    assert find_raised(AlarmFigure.BROKEN, "", 0.1, steps([MIN_TRAJECTORIES], of=MIN_TRAJECTORIES)) is not None
    few, enough = (AlarmStep(1, 1, groups=n, same_reward=n) for n in (MIN_GROUPS - 1, MIN_GROUPS))
    assert find_raised(AlarmFigure.SAME_REWARD, "", 0.9, [few]) is None
    assert find_raised(AlarmFigure.SAME_REWARD, "", 0.9, [enough]) == Raised(1, 1, 1, 1, 1.0, None)


def test_a_kind_counts_alone_and_what_is_not_known_is_not_zero() -> None:
    one = AlarmStep(7, 10, broken=10, findings={"boundary_merge": 3}, truncated=None)
    assert value_of(AlarmFigure.FINDING, "boundary_merge", one) == 0.3
    assert value_of(AlarmFigure.FINDING, "template_rewrites", one) == 0.0
    assert value_of(AlarmFigure.TRUNCATED, "", one) is None and value_of(AlarmFigure.GAP, "", one) is None
    assert value_of(AlarmFigure.TRUNCATED, "", AlarmStep(1, 10, truncated=4)) == 0.4
    assert find_raised(AlarmFigure.FINDING, "boundary_merge", 0.0, [AlarmStep(1, 10)]) is None


def test_the_gap_is_compared_with_the_median_of_its_own_first_steps() -> None:
    quiet = [0.01, 0.01, 0.5, 0.01, 0.01]  # one wild first step does not hide what follows
    found = find_raised(AlarmFigure.GAP, "", 3.0, gaps([*quiet, 0.02, 0.031, None, 0.05]))
    assert found == Raised(6, 8, 2, 8, 0.05, baseline=0.01)
    assert find_raised(AlarmFigure.GAP, "", 3.0, gaps([0.01] * 4 + [0.9])) is None  # the first steps themselves
    assert find_raised(AlarmFigure.GAP, "", 3.0, gaps([0.2] * 50)) is None


def test_rounding_raises_nothing_and_a_broken_number_is_left_out() -> None:
    exact = [0.0] * FIRST_STEPS
    assert find_raised(AlarmFigure.GAP, "", 3.0, gaps([*exact, MIN_GAP])) is None
    found = find_raised(AlarmFigure.GAP, "", 3.0, gaps([*exact, math.nan, math.inf, 2 * MIN_GAP]))
    assert found is not None and (found.first_step, found.n_steps) == (FIRST_STEPS + 2, 1)


def test_every_figure_has_a_title_a_sentence_and_but_for_a_kind_a_default() -> None:
    assert set(TITLES) == set(AlarmFigure) and set(DEFAULTS) == set(AlarmFigure) - {AlarmFigure.FINDING}
    for figure in AlarmFigure:
        said = alarm_sentence(figure, "Boundary merge", 0.25, Raised(1200, 1300, 2, 1250, 0.5, 0.1))
        assert said.startswith("Since training step 1,200") and said.endswith(
            "2 steps are above it, the last one is 1,300."
        )
    assert alarm_sentence(AlarmFigure.GAP, "", 3.0, Raised(6, 6, 1, 6, 0.05, 0.01)) == (
        "Since training step 6 the mean gap between trainer and sampler is above 3 times its first steps: 0.05 at step "
        "6, against 0.01. One step is above it."
    )


@pytest.mark.parametrize(
    ("share", "said"), [(0.1, "10 %"), (0.125, "12.5 %"), (0.0, "0 %"), (0.0001, "0.01 %"), (1.0, "100 %")]
)
def test_a_share_is_said_in_percent(share: float, said: str) -> None:
    assert percent(share) == said
