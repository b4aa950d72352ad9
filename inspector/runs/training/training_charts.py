"""The charts over training steps or policy versions: their lines, and the numbers beside each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from inspector.html.inspector_tags import decimal, finding_title
from rollout_inspector.streams.figures import share
from rollouts.store.runs.training_steps import NOT_DECIDABLE, FiguresLine

MAX_KINDS = 6  # Kinds of findings that are drawn, those of most trajectories.
MAX_TABLE_ROWS = 20  # Training steps that the table of a chart shows, evenly spaced.
MIN_CHANGED = 8  # Values of a figure of which a sentence says where they change.
PARTED_SHARE = 0.6
"""Of the variance: what two means instead of one must explain. Of a straight slope they explain three quarters."""
KINDS_TEXT = "Share of the trajectories of a step with a finding of the kind."


@dataclass(frozen=True)
class TrainingChart:
    """A chart over the training steps. Its lines are drawn from the JSON of the page."""

    id: str
    title: str
    text: str
    series: tuple[tuple[str, str], ...]
    """Name of a line, and its field: ``lost/sampled`` is a share, ``gap.p99`` a field of an object."""

    @property
    def lines(self) -> str:
        """The series as one text, for the script that draws them."""
        return "|".join(f"{name}={path}" for name, path in self.series)


CHARTS = (
    TrainingChart("broken", "Broken trajectories",
                  "Share of the trajectories of a step with a finding of severity error.",
                  (("broken", "broken/trajectories"), ("cut by length", "truncated/trajectories"))),
    TrainingChart("reward", "Reward", "Mean over the trajectories of a step that have one.",
                  (("reward", "reward_mean"),)),
    TrainingChart("gap", "Gap between trainer and sampler",
                  "Difference of the log-probabilities of the tokens under the loss mask, without its sign.",
                  (("mean", "gap.mean_abs"), ("median", "gap.median"), ("99th percentile", "gap.p99"))),
    TrainingChart("largest", "Largest difference",
                  "Between trainer and sampler, over all tokens of a step: one or two tokens can set it.",
                  (("largest", "gap.largest"),)),
    TrainingChart("tails", "Both tails of the gap",
                  "Trainer − sampler: 1 % of the tokens lie below the lower line, and 1 % above the upper line.",
                  (("1st percentile", "gap.low"), ("99th percentile", "gap.high"))),
    TrainingChart("lost", "Tokens lost and computed again",
                  "Lost: sampled tokens that no row trains as they were sampled. Computed again: prompt tokens that a "
                  "break has the engine read once more. Both for each sampled token.",
                  (("lost", "lost/sampled"), ("computed again", "repaid/sampled"))),
    TrainingChart("rows", "Rows per engine call", "Training rows for each call: the lower, the fewer breaks.",
                  (("rows per call", "rows_per_call"),)),
    TrainingChart("lengths", "Tokens per trajectory", "Mean number of stored tokens.",
                  (("tokens", "tokens_per_trajectory"),)),
    TrainingChart("groups", "Groups that teach nothing", "Share of the groups in which all rewards are equal.",
                  (("same reward", "same_reward/groups"),)),
)


def charts_of(lines: Sequence[FiguresLine]) -> list[TrainingChart]:
    """The charts that have something to show, with one of the most frequent kinds of findings."""
    kinds, n_kinds = frequent_kinds([lines])
    charts = [replace(chart, series=series_of) for chart in CHARTS if (series_of := _told(chart, lines))]
    if kinds:
        text = KINDS_TEXT
        if n_kinds > MAX_KINDS:
            text += f" The {MAX_KINDS} most frequent of {n_kinds} kinds."
        series = tuple((finding_title(kind), f"findings.{kind}/trajectories") for kind in kinds)
        charts.insert(1, TrainingChart("kinds", "Findings by kind", text, series))
    return charts


def frequent_kinds(runs: Sequence[Sequence[FiguresLine]]) -> tuple[list[str], int]:
    """The :data:`MAX_KINDS` kinds that most trajectories have, and how many kinds there are."""
    totals: dict[str, int] = {}
    for line in (line for lines in runs for line in lines):
        for kind, n in line.findings.items():
            totals[kind] = totals.get(kind, 0) + n
    totals.pop(NOT_DECIDABLE, None)
    return sorted(totals, key=lambda kind: (-totals[kind], kind))[:MAX_KINDS], len(totals)


def _told(chart: TrainingChart, lines: Sequence[FiguresLine]) -> tuple[tuple[str, str], ...]:
    """The lines of a chart of which a value is known."""
    return tuple((name, path) for name, path in chart.series if any(value_at(line, path) is not None for line in lines))


def value_at(line: FiguresLine, path: str) -> float | None:
    """A figure by its path: ``lost/sampled`` is a share, ``gap.p99`` a field of an object. A kind of finding that the
    step lacks counts 0. None = not known, or a share of nothing."""
    top, _, bottom = path.partition("/")
    name, _, field = top.partition(".")
    value = getattr(line, name)
    if field:
        value = None if value is None else value.get(field, 0 if name == "findings" else None)
    if value is None or not bottom:
        return value  # type: ignore[no-any-return]
    of = getattr(line, bottom)
    return share(value, of) if of else None


def figures_of(runs: Sequence[Sequence[FiguresLine]]) -> list[tuple[str, str, str, str]]:
    """Id, title, text and path of each figure: those of :data:`CHARTS`, then the most frequent kinds of findings."""
    figures = [
        (
            f"{chart.id}-{n}",
            chart.title if len(chart.series) == 1 or chart.title.lower().startswith(name) else f"{chart.title}: {name}",
            chart.text if len(chart.series) == 1 else "",
            path,
        )
        for chart in CHARTS
        for n, (name, path) in enumerate(chart.series)
    ]
    return figures + [
        (f"kind-{n}", f"Finding: {finding_title(kind)}", KINDS_TEXT, f"findings.{kind}/trajectories")
        for n, kind in enumerate(frequent_kinds(runs)[0])
    ]


def changes_of(lines: Sequence[FiguresLine], places: Sequence[str]) -> list[str]:
    """A sentence for each figure that is another before a step than from it on. ``places``: the steps in words. The
    step is the one whose two means explain most of the variance. A figure has at least 8 values, and its means differ
    by a tenth."""
    sentences = []
    for _, title, _, path in figures_of([lines]):
        known = [(place, value) for place, line in zip(places, lines, strict=True)
                 if (value := value_at(line, path)) is not None]
        values = np.array([value for _, value in known], float)
        n, total = len(values), float(((values - values.mean()) ** 2).sum()) if len(values) else 0.0
        if n < MIN_CHANGED or not total:
            continue
        counts, sums = np.arange(1, n), values.cumsum()[:-1]
        before, after = sums / counts, (values.sum() - sums) / (n - counts)
        explained = counts * (n - counts) / n * (before - after) ** 2
        at = 1 + int(explained[1:-1].argmax())  # each part has two values at least
        low, high = float(before[at]), float(after[at])
        if explained[at] >= PARTED_SHARE * total and abs(high - low) >= 0.1 * max(abs(low), abs(high)):
            sentences.append(f"{title}: {decimal(low)} before {known[at + 1][0]}, {decimal(high)} from it on.")
    return sentences


def spaced(n: int) -> list[int]:
    """The places of ``n`` steps that the table of a chart shows: all, or :data:`MAX_TABLE_ROWS` evenly spaced."""
    last = MAX_TABLE_ROWS - 1
    return list(range(n)) if n <= MAX_TABLE_ROWS else sorted({round(i * (n - 1) / last) for i in range(MAX_TABLE_ROWS)})


def numbers(
    chart: TrainingChart, lines: Sequence[FiguresLine], labels: Sequence[str]
) -> list[tuple[str, list[float | None]]]:
    """The table beside a chart: what some of the steps are called, and the values of its lines there."""
    return [(labels[i], [value_at(lines[i], path) for _, path in chart.series]) for i in spaced(len(lines))]
