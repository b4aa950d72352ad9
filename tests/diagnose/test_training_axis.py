"""Sentences about the training steps of a run: missing, out of order, or there again."""

from dataclasses import dataclass

import pytest

from rollout_inspector.diagnose.training_axis import axis_sentences, missing_steps


@dataclass(frozen=True)
class AxisStep:
    training_step: int
    first: int | None
    last: int | None


def axis(*places: tuple[int, int, int]) -> list[AxisStep]:
    return [AxisStep(*place) for place in places]


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ([], []), ([5], []), ([0, 1, 2], []), ([0, 10, 20], []), ([0, 1, 3, 4], [(2, 2)]),
        ([0, 10, 20, 50], [(30, 40)]), ([1, 2, 3, 9], [(4, 8)]),
    ],
)
def test_missing_steps_are_those_that_the_usual_distance_leaves_out(
    steps: list[int], missing: list[tuple[int, int]]
) -> None:
    assert missing_steps(steps) == missing


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (axis((0, 0, 3), (1, 4, 7), (2, 8, 11)), []),
        (axis((2, 8, 11), (0, 0, 5), (1, 4, 7)), []),  # steps may overlap, as of an asynchronous trainer
        (axis((0, 0, 3), (1, 4, 7), (5, 8, 9)), ["No trajectory has training step 2 to 4."]),
        (axis((3, 0, 3), (9, 4, 7), (15, 8, 11), (27, 12, 12), (45, 13, 13)),
         ["No trajectory has training step 21 or 33 to 39."]),
        (axis((0, 4, 7), (1, 0, 3)), ["The steps did not come in order: step 1 was stored before step 0."]),
        (axis((0, 0, 1), (1, 2, 9), (2, 3, 8), (3, 5, 6)),
         ["Trajectories of training step 1 and 2 were stored before and after all those of another step"]),
        ([AxisStep(0, None, None), AxisStep(1, None, None)], []),
    ],
)
def test_each_oddity_is_a_sentence(steps: list[AxisStep], said: list[str]) -> None:
    found = axis_sentences(steps)
    assert len(found) == len(said) and all(one.startswith(text) for one, text in zip(found, said, strict=True)), found


def test_of_many_places_a_sentence_names_the_first() -> None:
    (said,) = axis_sentences([AxisStep(step, step, step) for n in range(9) for step in range(10 * n, 10 * n + 5)])
    assert said.startswith("No trajectory has training step 5 to 9, 15 to 19, 25 to 29 or 5 more.")
