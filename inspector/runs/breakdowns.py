"""The findings and the ends of a run by kind: lines that filter its list when they are pressed."""

from collections.abc import Collection
from dataclasses import dataclass

from inspector.html.inspector_tags import plural
from inspector.runs.filters import ListQuery
from rollout_inspector.streams.figures import percent_of
from rollouts.store.parameters import SEVERITIES
from rollouts.store.runs.run_summary import RunSummary


@dataclass(frozen=True)
class Choice:
    """A line of a breakdown. Pressing it filters the list."""

    name: str
    count: int
    most: int
    query: str  # Empty when the list cannot be filtered by it.
    chosen: bool
    notes: tuple[str, ...] = ()
    severity: str = ""  # The worst severity of its findings.
    muted: bool = False  # Of a kind of finding: the project knows it in this run.


def finding_choices(
    summary: RunSummary, wanted: ListQuery, n_ended: int, muted: Collection[str] = ()
) -> list[Choice]:
    """Findings by kind: errors, then warnings, then notes, and of each severity the one that costs most first.
    ``n_ended``: the trajectories that ended. ``muted``: the kinds that are muted in the run, which come last."""
    most = max(summary.finding_counts.values(), default=0)
    choices = []
    for kind, count in summary.finding_counts.items():
        severities = summary.finding_severities.get(kind, {})
        n, tokens = summary.finding_trajectories.get(kind, 0), summary.finding_tokens.get(kind, 0)
        one_row = summary.finding_one_row.get(kind, 0)
        notes = [f"{plural(n, 'trajectory,trajectories')}, {percent_of(n, n_ended)}"] if 0 < n <= n_ended else []
        if len(severities) > 1:
            notes.append(" and ".join(severity_count(severity, n) for severity, n in severities.items()))
        if tokens is None:
            notes.append("tokens lost or wrong: not known")
        elif tokens:
            notes.append(f"{plural(tokens, 'token')} lost or wrong")
        if one_row:
            notes.append(f"{plural(one_row, 'token')} lost if trained as a single row")
        choices.append(
            Choice(
                kind, count, most, wanted.list_query(finding="" if wanted.kind == kind else kind), wanted.kind == kind,
                tuple(notes), next(iter(severities), ""), kind in muted,
            )
        )

    def place(choice: Choice) -> tuple[bool, int, int, int, int]:
        tokens, one_row = summary.finding_tokens.get(choice.name) or 0, summary.finding_one_row.get(choice.name, 0)
        severity = SEVERITIES.index(choice.severity) if choice.severity else 9
        return choice.muted, severity, -tokens, -one_row, -choice.count

    return sorted(choices, key=place)


def severity_count(severity: str, n: int) -> str:
    """`1 error`, `2 warnings`, `3 notes`."""
    return plural(n, "note" if severity == "info" else severity)


def findings_sentences(summary: RunSummary) -> list[tuple[str, str]]:
    """(severity, sentence): the number of trajectories with each worst severity."""
    counts = summary.severities
    clean = counts.get("", 0) if set(summary.by_status) == {"done"} else 0
    counts_by_words = [
        ("error", counts.get("error", 0), "with an error"),
        ("warning", counts.get("warning", 0), "with a warning and no error"),
        ("info", counts.get("info", 0), "with notes only"),
        (
            "",
            clean,
            "without a finding" + " in what was checked" * any(entry.not_decidable for entry in summary.checks),
        ),
    ]
    present = [entry for entry in counts_by_words if entry[1]]
    return [
        (severity, f"{plural(n, 'trajectory,trajectories') if place == 0 else format(n, ',')} {words}")
        for place, (severity, n, words) in enumerate(present)
    ]


def stop_choices(summary: RunSummary, wanted: ListQuery) -> list[Choice]:
    """Why trajectories ended, the most frequent first. Trajectories that have not ended are left out. Failed and
    cancelled ones have no stop reason: their status counts."""
    cut = {name: summary.by_status.get(name, 0) for name in ("failed", "cancelled")}
    unfinished = sum(summary.by_status.get(status, 0) for status in ("queued", "running"))
    counts = dict(summary.stop_reasons)
    if "" in counts:
        counts[""] = max(counts[""] - unfinished - sum(cut.values()), 0)
    ends = [("stop", name, count, wanted.stop_reason) for name, count in counts.items()]
    ends += [("status", name, count, wanted.status) for name, count in cut.items()]
    ends = sorted((end for end in ends if end[2]), key=lambda end: -end[2])
    return [
        Choice(
            name, count, ends[0][2], wanted.list_query(**{parameter: "" if chosen == name else name}) if name else "",
            bool(name) and chosen == name,
        )
        for parameter, name, count, chosen in ends
    ]
