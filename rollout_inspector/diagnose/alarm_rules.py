"""Alarms over training steps: which figures have a limit, and since when a run is above one. Pure: no database."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollout_inspector.streams.figures import share

MIN_TRAJECTORIES = 8  # A step with fewer trajectories is checked by no share of them: one of two would be half.
MIN_GROUPS = 4  # A step with fewer scored groups is not checked by them.
FIRST_STEPS = 5  # The gap of a step is compared with the median over so many first steps that have one.
MIN_GAP = 0.001  # A mean gap below it, in nats, raises nothing, however small the first steps were: that is rounding.


class AlarmFigure(StrEnum):
    """A figure of a training step that may have a limit. A value is stored and stays."""

    BROKEN = "broken"  # Share of the trajectories with a finding of severity error.
    FINDING = "finding"  # Share of the trajectories with a finding of one kind.
    GAP = "gap"  # Mean gap between trainer and sampler, as a multiple of that of the run's first steps.
    TRUNCATED = "truncated"  # Share of the trajectories that were cut by their length.
    SAME_REWARD = "same_reward"  # Share of the scored groups whose rewards are all equal.


DEFAULTS: Mapping[AlarmFigure, float] = {
    AlarmFigure.BROKEN: 0.1, AlarmFigure.GAP: 3.0, AlarmFigure.TRUNCATED: 0.5, AlarmFigure.SAME_REWARD: 0.9,
}
"""The limits that hold where nobody has said otherwise."""


@dataclass(frozen=True)
class AlarmStep:
    """The figures of one training step that alarms look at."""

    training_step: int
    trajectories: int
    broken: int = 0
    findings: Mapping[str, int] = field(default_factory=dict)  # Kind -> trajectories that have such a finding.
    truncated: int | None = None  # Trajectories that were cut by their length; None = not known.
    groups: int = 0  # Groups with at least two rewards.
    same_reward: int = 0
    gap: float | None = None  # Mean gap in nats; None = not known.


@dataclass(frozen=True)
class Raised:
    """A run is above a limit."""

    first_step: int
    """The first training step above it."""
    last_step: int
    """The last one."""
    n_steps: int
    """Steps above it."""
    worst_step: int
    """The first step with the largest value."""
    worst: float
    """That value: a share from 0 to 1, or the mean gap in nats."""
    baseline: float | None
    """Of the gap: the median over the first steps, in nats."""


def find_raised(figure: AlarmFigure, kind: str, limit: float, steps: Iterable[AlarmStep]) -> Raised | None:
    """Where a run is above a limit; None = nowhere. Steps may come in any order; one that is not known is left out.
    ``kind``: of the findings, for :attr:`AlarmFigure.FINDING` alone."""
    known_steps = [
        (step.training_step, value)
        for step in sorted(steps, key=lambda step: step.training_step)
        if (value := value_of(figure, kind, step)) is not None
    ]
    baseline, bound = None, limit
    if figure is AlarmFigure.GAP:
        first, known_steps = known_steps[:FIRST_STEPS], known_steps[FIRST_STEPS:]
        if not known_steps:
            return None
        baseline = statistics.median(value for _, value in first)
        bound = max(limit * baseline, MIN_GAP)
    above = [(step, value) for step, value in known_steps if value > bound]
    if not above:
        return None
    worst_step, worst = max(above, key=lambda one: (one[1], -one[0]))
    return Raised(above[0][0], above[-1][0], len(above), worst_step, worst, baseline)


def value_of(figure: AlarmFigure, kind: str, step: AlarmStep) -> float | None:
    """The value of a figure at a step; None = it is not known there, or the step is too small to be checked by it."""
    if figure is AlarmFigure.GAP:
        return step.gap if step.gap is not None and math.isfinite(step.gap) else None
    if figure is AlarmFigure.SAME_REWARD:
        return share(step.same_reward, step.groups) if step.groups >= MIN_GROUPS else None
    if step.trajectories < MIN_TRAJECTORIES:
        return None
    if figure is AlarmFigure.FINDING:
        return share(step.findings.get(kind, 0), step.trajectories)
    if figure is AlarmFigure.TRUNCATED:
        return None if step.truncated is None else share(step.truncated, step.trajectories)
    return share(step.broken, step.trajectories)


def limit_words(figure: AlarmFigure, limit: float) -> str:
    """A limit as pages show it: a percentage, or a multiple."""
    return f"{limit:g} times its first steps" if figure is AlarmFigure.GAP else percent(limit)


def alarm_sentence(figure: AlarmFigure, kind_title: str, limit: float, found: Raised) -> str:
    """What an alarm says. ``kind_title``: the kind of findings in words."""
    where = f"Since training step {found.first_step:,}"
    if figure is AlarmFigure.GAP:
        sentence = (
            f"{where} the mean gap between trainer and sampler is above {limit:g} times its first steps: "
            f"{found.worst:.3g} at step {found.worst_step:,}, against {found.baseline or 0.0:.3g}"
        )
    else:
        of = {
            AlarmFigure.BROKEN: "trajectories with an error",
            AlarmFigure.FINDING: f"trajectories with the finding “{kind_title}”",
            AlarmFigure.TRUNCATED: "trajectories that their length cut",
            AlarmFigure.SAME_REWARD: "groups whose rewards are all equal",
        }[figure]
        sentence = (
            f"{where} the share of {of} is above {percent(limit)}: {percent(found.worst)} at step {found.worst_step:,}"
        )
    many = f"{found.n_steps:,} steps are above it, the last one is {found.last_step:,}."
    return f"{sentence}. {'One step is above it.' if found.n_steps == 1 else many}"


def percent(part: float) -> str:
    """A share as a percentage with at most one decimal, or with as many as it needs to be no zero."""
    amount = part * 100
    text = f"{amount:.1f}".rstrip("0").rstrip(".")
    return f"{text if text != '0' or not amount else f'{amount:.2g}'} %"


TITLES: Mapping[AlarmFigure, str] = {
    AlarmFigure.BROKEN: "Trajectories with an error",
    AlarmFigure.FINDING: "Trajectories with a kind of finding",
    AlarmFigure.GAP: "Gap between trainer and sampler",
    AlarmFigure.TRUNCATED: "Trajectories cut by their length",
    AlarmFigure.SAME_REWARD: "Groups with equal rewards",
}
"""What each figure is called in forms and lists."""
