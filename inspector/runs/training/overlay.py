"""Several runs on the same axes: a chart for each figure of a training step, and a sentence that says what differs."""

from collections.abc import Sequence
from dataclasses import dataclass

from inspector.html.inspector_tags import decimal
from inspector.runs.training.training_charts import figures_of, spaced, value_at
from rollouts.store.runs.training_steps import TrainingStepLine


@dataclass(frozen=True)
class OverlaidChart:
    """One figure of all runs by training step."""

    id: str
    """Names the chart in the page."""
    title: str
    """The figure."""
    text: str
    """What the figure says."""
    difference: str
    """A sentence: what differs between the runs."""
    values: list[list[float | None]]
    """For each run, in the order of the page: the figure at each step of the axis; null = not known there."""


@dataclass(frozen=True)
class Overlay:
    """Runs on the same axes."""

    names: list[str]
    """What the lines are called, in the order of the runs; no two alike."""
    steps: list[int]
    """The axis: every training step that one of the runs has."""
    charts: list[OverlaidChart]
    """Only figures that a run has."""


def overlay(names: Sequence[str], runs: Sequence[Sequence[TrainingStepLine]]) -> Overlay:
    """``runs``: the figures of each run by training step; ``names``: what the runs are called."""
    labels = _told_apart(names)
    quoted = [f"“{label}”" for label in labels]
    steps = sorted({line.training_step for lines in runs for line in lines})
    of_step = [{line.training_step: line for line in lines} for lines in runs]
    charts = []
    for id, title, text, path in figures_of(runs):
        values = [
            [value_at(lines_by_step[step], path) if step in lines_by_step else None for step in steps]
            for lines_by_step in of_step
        ]
        if any(value is not None for line in values for value in line):
            charts.append(OverlaidChart(id, title, text, difference(quoted, steps, values), values))
    return Overlay(labels, steps, charts)


def difference(names: Sequence[str], steps: Sequence[int], values: Sequence[Sequence[float | None]]) -> str:
    """What differs between the lines of a chart, in one or two sentences. Lines are compared where all have a value."""
    known_runs = [n for n, line in enumerate(values) if any(value is not None for value in line)]
    lacking = [names[n] for n in range(len(names)) if n not in known_runs]
    lack_words = f" Not known of {_listed(lacking)}." if lacking else ""
    if len(known_runs) < 2:
        return f"Only {names[known_runs[0]]} has this figure." if known_runs else "No run has this figure."
    shared = [i for i in range(len(steps)) if all(values[n][i] is not None for n in known_runs)]
    if not shared:
        among = _listed([names[n] for n in known_runs])
        return f"{among} have no training step in common at which this is known.{lack_words}"
    values_of_run = {n: [float(values[n][i] or 0.0) for i in shared] for n in known_runs}
    where = "the one step that they share" if len(shared) == 1 else f"the {len(shared):,} steps that they share"
    if all(line == values_of_run[known_runs[0]] for line in values_of_run.values()):
        return f"The same at {where}.{lack_words}"
    means = {n: sum(line) / len(line) for n, line in values_of_run.items()}
    high, low = max(known_runs, key=lambda n: means[n]), min(known_runs, key=lambda n: means[n])
    if high == low:  # equal means of lines that differ
        high, low = known_runs[0], known_runs[1]
    apart = [a - b for a, b in zip(values_of_run[high], values_of_run[low], strict=True)]
    at = max(range(len(shared)), key=lambda i: abs(apart[i]))
    words = (
        f"Over {where}, the mean is {decimal(means[high])} in {names[high]} and {decimal(means[low])} in {names[low]}; "
        f"they are furthest apart at step {steps[shared[at]]:,}, {decimal(values_of_run[high][at])} against "
        f"{decimal(values_of_run[low][at])}."
    )
    return words + _since(names[high], [steps[i] for i in shared], apart) + lack_words


def _since(name: str, steps: Sequence[int], apart: Sequence[float]) -> str:
    """From which step on a line stays above the other one; empty where it does not, or for a single step."""
    first = len(apart)
    while first and apart[first - 1] > 0:
        first -= 1
    if len(apart) < 2 or len(apart) - first < 2:
        return ""
    return f" {name} is higher at every step{f' from {steps[first]:,} on' if first else ''}."


def table(shown: Overlay, chart: OverlaidChart) -> list[tuple[int, list[float | None]]]:
    """The steps and values that the table of a chart shows: all, or some, evenly spaced."""
    return [(shown.steps[i], [line[i] for line in chart.values]) for i in spaced(len(shown.steps))]


def _told_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number where two runs are called alike."""
    labels: list[str] = []
    for name in names:
        label, n = name, 2
        while label in labels:
            label, n = f"{name} ({n})", n + 1
        labels.append(label)
    return labels


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
