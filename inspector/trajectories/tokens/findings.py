"""The findings of a trajectory: as the API tells them, and where a row holds their places."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self
from urllib.parse import urlencode

from django.urls import reverse

from inspector.runs.cached_figures import summary_of
from inspector.web.twins import Page, from_columns
from rollout_inspector.diagnose.finding import Axis, Cost, Severity, cost_sentence
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.streams.align import place_in_row
from rollout_inspector.streams.figures import lost_or_wrong
from rollouts.store.models import StoredFinding, StoredTrajectory
from rollouts.store.runs.figures import is_large
from rollouts.store.runs.imports import OPENED
from rollouts.store.runs.muted import muted_in
from rollouts.store.trajectories.findings import places_of_kinds
from rollouts.store.trajectories.trajectories import load_trajectories
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary, findings_in_order, places_of

MAX_PLACED_TOKENS = 300_000  # The most tokens of a trajectory that are aligned with its rows for a page.


@dataclass(frozen=True)
class FindingValues(Page):
    """A finding of the diagnosis."""

    trajectory: str
    """Code of its trajectory."""
    number: int
    """Its number in its trajectory, from 1, in reading order."""
    url: str
    """Address of its trajectory, which opens at it."""
    kind: str
    """What it is."""
    title: str
    """The kind in words."""
    axis: str
    """Which part of the diagnosis found it."""
    severity: str
    """``error``, ``warning`` or ``info``."""
    step: int | None
    """The step that it is about."""
    row: int | None
    """The row that it is about."""
    start: int
    """Offset of its first token in the stream of the step, or in the row."""
    stop: int
    """Offset behind its last token."""
    places: list[tuple[int, int]]
    """Every stretch ``[start, stop)`` that it is about."""
    expected_text: str
    """What should stand there, as text."""
    actual_text: str
    """What stands there, as text."""
    evidence: str
    """What was seen, as a sentence."""
    remedy: str
    """What to do about it."""
    missing: str
    """The fields that the source lacks to decide it."""
    trained_tokens_lost: int | None
    """Sampled tokens that no row trains because of it; null = not known."""
    trained_tokens_wrong: int | None
    """Tokens that are trained and were not sampled; null = not known."""
    cost: Cost
    """All that it costs, under the keys that the commands print too."""
    damage_share: float | None
    """Of the damage to its trajectory, what it explains; null = not measured."""
    version: int
    """Of the diagnosis that made it."""
    muted: bool
    """The project knows findings of this kind in this run."""

    @classmethod
    def of(cls, finding: StoredFinding, trajectory: str, number: int, muted: Collection[str] = (), **more: Any) -> Self:
        """A finding of the trajectory with that code. ``muted``: the kinds that are muted in its run."""
        return from_columns(
            cls, finding, trajectory=trajectory, number=number,
            url=f"{reverse('trajectory', args=[trajectory])}?number={number}", title=title_of(finding.kind),
            step=finding.step_index, row=finding.row_index, places=places_of(finding), muted=finding.kind in muted,
            **more,
        )


@dataclass(frozen=True)
class DrawnFinding(FindingValues):
    """A finding with its place in a row of its trajectory."""

    cost_text: str = ""
    """The cost in words; empty when it costs nothing."""
    drawn_row: int | None = None
    """The row that holds its place; null when none does."""
    drawn_places: tuple[tuple[int, int], ...] = ()
    """Every stretch of that row that it marks, each at least one token."""
    is_held: bool = True
    """False: the row trains other tokens in its place, and ``drawn_places`` are theirs."""

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens that it loses, and trained tokens that it makes wrong; 0 where that is not known."""
        return lost_or_wrong(self.trained_tokens_lost, self.trained_tokens_wrong)

    @property
    def is_harmless_here(self) -> bool:
        """A break over which no row goes on: nothing is lost, and nothing that was not sampled is trained."""
        return self.is_comparable and self.trained_tokens_lost == self.trained_tokens_wrong == 0

    @property
    def weight(self) -> str:
        """The severity that it is drawn with: a muted finding is as quiet as a note."""
        return Severity.INFO.value if self.muted else self.severity

    @property
    def severity_words(self) -> str:
        """Its severity in words."""
        return f"{self.severity}, muted" if self.muted else self.severity

    @property
    def words(self) -> str:
        """Its number, title and severity."""
        return f"{self.number}: {self.title} ({self.severity_words})"

    @property
    def is_comparable(self) -> bool:
        """The page “Side by side” can show it: expected against read, or sampled against re-tokenized."""
        return self.axis == Axis.STREAM and self.step is not None


def read_findings(
    trajectory: StoredTrajectory, steps: Sequence[StepSummary], rows: Sequence[RowSummary]
) -> list[DrawnFinding]:
    """Findings in reading order, errors first within a step, each with the row that holds its place."""
    if not trajectory.n_findings:
        return []
    follows = {row.index for row in rows if row.follows_steps}
    row_of_step = {step.index: step.row for step in steps if step.row in follows}
    items, muted = [], muted_in(trajectory.run)
    for number, finding in enumerate(findings_in_order(trajectory), start=1):
        row = finding.row_index
        items.append(DrawnFinding.of(
            finding, trajectory.code, number, muted, cost_text=cost_sentence(finding.cost, finding.severity),
            drawn_row=row if finding.step_index is None else row_of_step.get(finding.step_index, row),
            drawn_places=tuple((start, max(stop, start + 1)) for start, stop in places_of(finding)),
        ))
    return _placed(trajectory, items, steps, rows)


def _placed(
    trajectory: StoredTrajectory, items: list[DrawnFinding], steps: Sequence[StepSummary], rows: Sequence[RowSummary],
) -> list[DrawnFinding]:
    """The findings; one that no row holds gets the place of what a row trains instead. Reads the arrays for these."""
    trained_in = {step: row for row in rows if not row.follows_steps for step in row.steps}
    loose = [item for item in items if item.drawn_row is None and item.step in trained_in]
    if not loose or trajectory.n_tokens > MAX_PLACED_TOKENS:
        return items
    (value,) = load_trajectories([trajectory])
    own = dict(zip([row.index for row in rows if not row.follows_steps], value.rows, strict=True))
    placed = {}
    for item in loose:
        assert item.step is not None
        row = trained_in[item.step]
        place = place_in_row(value.steps, own[row.index], item.step, item.start, item.stop)
        if place is not None:
            places = ((place[0], max(place[1], place[0] + 1)),)
            placed[item.number] = replace(item, drawn_row=row.index, drawn_places=places, is_held=False)
    return [placed.get(item.number, item) for item in items]


SEVERITIES = (Severity.ERROR, Severity.WARNING, Severity.INFO)  # From bad to harmless.


def worst_finding(
    findings: Sequence[DrawnFinding], row: int | None = None, wanted: Mapping[str, str] | None = None
) -> DrawnFinding | None:
    """The worst finding that a row holds: by severity, then by trained tokens; of several the first.

    No info finding, and no muted one.

    ``wanted``: the filter of the list that led here. Where it asks for a kind or a severity, the worst of those,
    an info finding too.
    """
    kind, severity = (wanted or {}).get("finding", ""), (wanted or {}).get("severity", "")
    in_row = [item for item in findings if item.drawn_row is not None and row in (None, item.drawn_row)]
    if kind or severity:
        chosen = [i for i in in_row if (not kind or i.kind == kind) and (not severity or i.severity == severity)]
        if chosen:
            return _worst(chosen)
    return _worst([item for item in in_row if item.weight != Severity.INFO])


def _worst(findings: Sequence[DrawnFinding]) -> DrawnFinding | None:
    return min(findings, key=lambda item: (SEVERITIES.index(Severity(item.weight)), -item.trained_tokens), default=None)


Entry = Mapping[str, Any]  # A finding with its addresses, as :attr:`Reader.findings` makes it.

MAX_MARKDOWN_IDS = 24  # The most ids of one side that a finding copied as Markdown names.

InRun = Mapping[str, tuple[int, str]]
"""Kind -> how many trajectories of the run have it, and the address of the next of them, as :class:`FindingGroup`."""


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind and severity: one card."""

    entries: Sequence[Entry]
    n_in_run: int = 0  # The trajectories of the run that have its kind; 0 where the reader may not see the run.
    next_url: str = ""  # The next one that has it, behind the last one the first; empty where there is no other.

    @property
    def first(self) -> Entry:
        """The entry whose difference the card shows: the one that the address marks, else the first."""
        return next((entry for entry in self.entries if entry["current"]), self.entries[0])


def group_findings(entries: Sequence[Entry], in_run: InRun) -> list[FindingGroup]:
    """The cards of findings: by severity, then in the order in which their kinds come first."""
    weights = [severity.value for severity in SEVERITIES]
    kinds = list(dict.fromkeys(entry["item"].kind for entry in entries))

    def place(entry: Entry) -> tuple[int, int]:
        return weights.index(entry["item"].weight), kinds.index(entry["item"].kind)

    return [
        FindingGroup(list(group), *in_run.get(kinds[kind], ()))
        for (_, kind), group in groupby(sorted(entries, key=place), key=place)
    ]


def kinds_in_run(trajectory: StoredTrajectory, kinds: Sequence[str]) -> InRun:
    """How many trajectories of the run have these kinds, and the next of them. Two queries. For a large run one, of its
    stored figures; the next one is then met by the filter of the list. Nothing where files are open in place: they are
    read as one looks."""
    run = trajectory.run
    if not kinds or OPENED in run.settings:
        return {}
    if is_large(run):
        counts = summary_of(run).finding_trajectories
        places: dict[str, tuple[int, str | None]] = {kind: (counts.get(kind, 1), None) for kind in kinds}
    else:
        places = places_of_kinds(trajectory, kinds)
    in_run = {}
    for kind, (n, next_code) in places.items():
        code = next_code or (trajectory.code if is_large(run) else "")
        asks = urlencode({"finding": kind})
        in_run[kind] = n, f"{reverse('trajectory', args=[code])}?{asks}" if code else ""
    return in_run


def markdown_of(entry: Entry, trajectory: StoredTrajectory) -> str:
    """A finding for a chat or an issue: sentence, ids, link and remedy. The link begins with ``/``, because only the
    browser knows the name of the server. Model output makes no markup."""
    item = entry["item"]
    where = f"{entry['place']} of {_plain(trajectory.external_id)} in run {trajectory.run.code}"
    lines = [f"**{item.title}** ({item.severity}, `{item.kind}`): {where}", "", _plain(item.evidence)]
    for name, ids in entry["ids"]:
        more = f" and {len(ids) - MAX_MARKDOWN_IDS} more" if len(ids) > MAX_MARKDOWN_IDS else ""
        lines += ["", f"{name}: `{ids[:MAX_MARKDOWN_IDS].tolist()}`{more}"]
    lines += ["", f"Cost: {item.cost_text}"] * bool(item.cost_text and item.severity != Severity.INFO)
    lines += ["", f"Remedy: {entry['remedy']}"] * bool(entry["remedy"])
    return "\n".join([*lines, "", f"[Open it]({entry['url']})", ""])


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", text)
