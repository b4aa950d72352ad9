"""A run as a line of the list of runs: how grave its findings are, and the cause that stands first."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inspector.runs.run_values import ListedRun
from inspector.runs.training.gap_causes import gap_causes
from inspector.web.twins import Page
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.models import Run
from rollouts.store.parameters import SEVERITIES
from rollouts.store.runs.logprob_columns import NamedCause
from rollouts.store.runs.runs import RunTotals

BAR_WIDTH = 200  # Width of the viewBox of the bar.
LEAST = 3.0  # The least width of a part, so that one of thousands is seen.


@dataclass(frozen=True)
class RunsPage(Page):
    """The list of runs."""

    runs: list[ListedRun]
    """One part of the list, newest first."""
    next: str | None
    """What ``after`` takes for the following part; None on the last."""
    totals: RunTotals
    """Over all runs that pass the filter."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def listed_run(
    run: Run, severities: Mapping[str, int], tags: list[str], project: str | None, muted: Collection[str], alarms: int,
    causes: Sequence[NamedCause],
) -> ListedRun:
    """``severities``: worst severity -> trajectories. ``muted``: the kinds that are muted in the run. ``alarms``: how
    many limits it is above. ``causes``: what its gap is put down to."""
    return ListedRun.of(
        run,
        project_code=run.project.code,
        worst=next(iter(severities.items()), None),
        severities=dict(severities),
        top_cause=top_cause(
            {kind: n for kind, n in run.finding_counts.items() if kind not in muted}, next(iter(severities), "")
        ),
        muted=sorted(kind for kind, n in run.finding_counts.items() if n and kind in muted),
        tags=tags,
        project=project,
        alarms=alarms,
        gap_causes=gap_causes(run, causes),
    )


def top_cause(counts: Mapping[str, int], worst: str) -> str | None:
    """The kind of the gravest usual severity that has most findings. ``worst``: the worst severity in the run. Where no
    finding is that grave, those of a graver kind are notes. Samples that are not canonical are notes in most runs, and
    cost something only beside another finding."""
    least = SEVERITIES.index(worst) if worst in SEVERITIES else 0

    def place(kind: str) -> tuple[int, bool, int, str]:
        usual = SEVERITIES.index(KINDS[kind].severity) if kind in KINDS else len(SEVERITIES)
        severity = usual if usual >= least else len(SEVERITIES) - 1
        return severity, kind == "noncanonical_sampling", -counts[kind], kind

    return min((kind for kind, n in counts.items() if n), key=place, default=None)


def severity_bar(run: ListedRun) -> list[dict[str, Any]]:
    """The parts of a bar that stands for all trajectories of a run, one for each worst severity, the gravest first."""
    total = max(run.trajectories, sum(run.severities.values()))
    parts, x = [], 0.0
    for severity, n in run.severities.items():
        width = max(BAR_WIDTH * n / total, LEAST)
        parts.append({"severity": severity, "n": n, "x": f"{x:.1f}", "width": f"{width:.1f}"})
        x += width
    return parts
