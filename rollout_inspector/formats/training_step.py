"""The training step of a trajectory: said by the user, by the record, or by the path of its file. Trainers write it in
many places: NeMo RL in the name ``train_data_step{N}.jsonl``, verl in ``{N}.jsonl`` and in ``step``, TRL and ms-swift
in ``step``, others in ``global_step``, ``iteration`` or a folder ``step_000123/``."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text import expressions

MAX_STEP = 2**31 - 1
NAMES = (
    "training_step", "train_step", "trainer_step", "global_step", "global_steps", "optimizer_step", "iteration",
    "rollout_id",
)
"""Keys of a record that mean the training step wherever they stand, the surest first."""
OF_TRAJECTORY = (*NAMES, "step", "gen_step")
"""Keys that mean it at the top of a record. Deeper, ``step`` counts engine calls."""
INSIDE = ("metadata", "meta", "info")  # Objects of a record that are looked into.
_TOUCHED = frozenset((*OF_TRAJECTORY, *INSIDE))
_IN_PATH = re.compile(
    r"(?:^|[/_.-])(?:global_?step|train_?step|training_?step|step|iteration|iter)[_-]?(\d{1,15})(?=$|[/_.-])",
    re.IGNORECASE,
)
MAX_PATTERN = 200  # Characters of a pattern of a user.
_PATTERN_SECONDS = 0.2  # A pattern that takes longer on the path of a file finds nothing.


@dataclass(frozen=True)
class TrainingStepRule:
    """What a user says about the training steps of what is read."""

    step: int | None = None  # The training step of everything that is read; None = it is looked for.
    pattern: str = ""
    """A regular expression with one group, the number. It is searched in the path of the file; empty = our own."""

    def in_path(self, path: str) -> int | None:
        """The training step that a path tells: of several places the last."""
        matches = self._by_pattern(path) if self.pattern else _IN_PATH.findall(path)
        numbers = [int(text) for text in matches if text.isdecimal() and len(text) <= 15]
        return as_step(numbers[-1]) if numbers else None

    def _by_pattern(self, path: str) -> list[str]:
        try:
            matches = expressions.matches(self.pattern, [path], _PATTERN_SECONDS, group=1)
            return [path[start:stop] for _, start, stop in matches]
        except expressions.ExpressionTooSlow:
            return []


ANY = TrainingStepRule()  # Nothing is said: the record tells, and else the path.


def checked_rule(step: object = None, pattern: str = "") -> TrainingStepRule:
    """The rule that a user asked for. Raises :class:`Refusal`."""
    if step not in (None, "") and pattern:
        raise Refusal("Say either the training step or the pattern that finds it, not both.")
    if pattern:
        if len(pattern) > MAX_PATTERN:
            raise Refusal(f"The pattern of the training step has more than {MAX_PATTERN} characters.")
        try:
            n_groups = expressions.check(pattern)
        except Refusal as refusal:
            raise Refusal(f"{pattern!r} is no regular expression to look for. {refusal}") from refusal
        if n_groups != 1:
            raise Refusal(f"{pattern!r} needs exactly one group, the number of the step: 'step_([0-9]+)'.")
        return TrainingStepRule(pattern=pattern)
    if step in (None, ""):
        return ANY
    text = str(step).strip()
    number = as_step(int(text)) if text.isdecimal() and len(text) <= 15 else None
    if number is None:
        raise Refusal(f"{text[:40]!r} is no training step. It is a whole number from 0 to {MAX_STEP}.")
    return TrainingStepRule(step=number)


def as_step(value: Any) -> int | None:
    """The value as a training step; None = it is none. Some writers keep each value in a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_STEP else None


def in_record(trajectory: Trajectory) -> int | None:
    """The training step that the fields of the record tell; None = they do not tell, or tell several."""
    if (own_step := _said(trajectory.extra, OF_TRAJECTORY)) is not None:
        return own_step
    extras = [*(row.extra for row in trajectory.rows), *(step.extra for step in trajectory.steps)]
    steps = {_said(extra, NAMES) for extra in extras if extra}
    return steps.pop() if len(steps) == 1 else None


def _said(fields: Mapping[str, Any], names: Iterable[str]) -> int | None:
    if _TOUCHED.isdisjoint(fields):
        return None
    for mapping in (fields, *(fields[name] for name in INSIDE if isinstance(fields.get(name), Mapping))):
        for name in names if mapping is fields else NAMES:
            if (step := as_step(mapping.get(name))) is not None:
                return step
    return None


def with_step(trajectory: Trajectory, of_path: int | None, rule: TrainingStepRule = ANY) -> Trajectory:
    """The trajectory with its training step as far as it is known. What the user says goes first; then the user's
    pattern, the field of the value, the record, and the path. ``of_path``: what the rule finds in that."""
    ways: tuple[Callable[[], int | None], ...] = (
        lambda: rule.step, lambda: of_path if rule.pattern else None, lambda: trajectory.training_step,
        lambda: in_record(trajectory), lambda: of_path,
    )
    step = next((step for way in ways if (step := way()) is not None), None)
    return trajectory if step == trajectory.training_step else replace(trajectory, training_step=step)
