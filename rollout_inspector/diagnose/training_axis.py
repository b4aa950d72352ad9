"""What is odd about the training steps of a run: some are missing, out of order, or came again. Pure: no database."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

MAX_NAMED = 3  # Places that a sentence names.


class AxisStep(Protocol):
    """Where the trajectories of a training step stand in their run."""

    @property
    def training_step(self) -> int: ...
    @property
    def first(self) -> int | None:
        """Position of the first one in the run, in the order in which they were stored; None = not known."""
    @property
    def last(self) -> int | None: ...


def axis_sentences(steps: Sequence[AxisStep]) -> list[str]:
    """A sentence for each oddity of the axis; empty = none. Steps may come in any order, each once."""
    ordered = sorted(steps, key=lambda one: one.training_step)
    again = came_again(ordered)
    once = [step for step in ordered if step.training_step not in again]
    sentences = []
    if missing := missing_steps([step.training_step for step in ordered]):
        sentences.append(
            f"No trajectory has training step {_listed([_range(*missing_range) for missing_range in missing], 'or')}. "
            "The lines of the charts go straight on there."
        )
    if again:
        steps_named = _listed([f"{step:,}" for step in sorted(again)], "and")
        sentences.append(
            f"Trajectories of training step {steps_named} were stored before and after all those of another step, as "
            "when a trainer goes back to a checkpoint. The figures are over all of them."
        )
    for before, after in pairwise(once):
        if before.first is not None and after.first is not None and after.first < before.first:
            sentences.append(
                f"The steps did not come in order: step {after.training_step:,} was stored before step "
                f"{before.training_step:,}. Charts and tables follow the number of the step."
            )
            break
    return sentences


def missing_steps(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of steps, both ends included, that ascending steps leave out. A trainer may write each tenth step."""
    apart = [b - a for a, b in pairwise(steps)]
    if not apart:
        return []
    usual = statistics.median_low(apart)
    return [(a + usual, b - usual) for a, b in pairwise(steps) if b - a >= 2 * usual]


def came_again(steps: Sequence[AxisStep]) -> set[int]:
    """The steps that have trajectories before and after all those of another step."""
    ranges = [(s.first, s.last, s.training_step) for s in steps if s.first is not None and s.last is not None]
    steps_again: set[int] = set()
    earliest_end = math.inf
    for _, last, step in sorted(ranges, reverse=True):
        if last > earliest_end:
            steps_again.add(step)
        earliest_end = min(earliest_end, last)
    return steps_again


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _listed(places: Sequence[str], word: str) -> str:
    *most, last = [*places[:MAX_NAMED], f"{len(places) - MAX_NAMED:,} more"] if len(places) > MAX_NAMED else places
    return f"{', '.join(most)} {word} {last}" if most else last
