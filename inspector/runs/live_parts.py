"""The parts of a run's page that change while it works. The page asks again with the marks of the parts that it shows.
The answer holds only the parts that changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from inspector.html.charts import histogram
from inspector.html.inspector_tags import plural
from inspector.runs.cached_figures import summary_of
from inspector.runs.filters import ListQuery
from inspector.runs.group_page import group_url, is_flat
from inspector.runs.launches.template_refusal import refusal
from inspector.runs.muted import muted_values
from inspector.runs.progress import progress
from inspector.runs.run_values import RunValues
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.web.access import reader_of
from inspector.web.twins import fields_of, whole_number
from rollout_inspector.diagnose.checks import all_clear, check_sentence
from rollout_inspector.streams.figures import percent_of
from rollouts.jobs import run_actions
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Run, StoredTrajectory
from rollouts.store.paging import ListPart
from rollouts.store.parameters import SEVERITIES
from rollouts.store.runs.figures import is_large
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.run_summary import RunSummary
from rollouts.store.runs.runs import count_running, failure_reasons
from rollouts.store.trajectories.comments import count_comments, seen_among
from rollouts.store.trajectories.findings import finding_kinds
from rollouts.store.trajectories.groups import group_stats
from rollouts.store.trajectories.trajectory_list import MAX_COUNTED, count_before, count_trajectories, list_trajectories


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


def finding_choices(summary: RunSummary, wanted: ListQuery, n_ended: int, muted: Collection[str] = ()) -> list[Choice]:
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
            words = {"info": "note"}
            notes.append(" and ".join(plural(n, words.get(severity, severity)) for severity, n in severities.items()))
        if tokens is None:
            notes.append("tokens lost or wrong: not known")
        elif tokens:
            notes.append(f"{plural(tokens, 'token')} lost or wrong")
        if one_row:
            notes.append(f"{plural(one_row, 'token')} lost if trained as a single row")
        choices.append(Choice(
            kind, count, most, wanted.list_query(finding="" if wanted.kind == kind else kind), wanted.kind == kind,
            tuple(notes), next(iter(severities), ""), kind in muted,
        ))

    def place(choice: Choice) -> tuple[bool, int, int, int, int]:
        tokens, one_row = summary.finding_tokens.get(choice.name) or 0, summary.finding_one_row.get(choice.name, 0)
        severity = SEVERITIES.index(choice.severity) if choice.severity else 9
        return choice.muted, severity, -tokens, -one_row, -choice.count

    return sorted(choices, key=place)


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


TRAJECTORIES_PER_PAGE = 50
TOP_KINDS = 5  # Kinds of findings that the page of a run shows unfolded.
MAX_REASONS = 5  # Reasons of failed trajectories that it names.
LOOK_SECONDS = 5
"""The page asks for progress every two seconds. Figures and list of a large run cost more: they are read less often."""
_MARKED_FIELDS = (
    "pk", "status", "stop_reason", "reward", "n_steps", "n_rows", "n_tokens", "n_trained", "n_findings", "error",
    "checks", "prompt_line", "answer_line",
)
"""The columns of a trajectory that its line shows and that can change."""
_MOVING = ("elapsed_seconds", "tokens_per_second", "remaining_seconds")
"""Fields that change with the clock. Their change is no reason to draw a part again."""


def mark_of(*values: Any) -> str:
    """A short hash of values: it changes when they change."""
    return hashlib.blake2s(repr(values).encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()


def nothing_new() -> HttpResponse:
    """The page is up to date: htmx swaps nothing and asks again later."""
    return HttpResponse(status=204)


def progress_part(run: Run) -> dict[str, Any]:
    """The run, and how far it is. One query."""
    live = run.kind == Run.Kind.LAUNCH and is_active(run)
    state = progress(run, count_running(run) if live else 0)
    return {
        "run": RunValues.of(run), "progress": state, "live": is_active(run), "resumable": run_actions.can_resume(run),
    }


def progress_mark(part: dict[str, Any]) -> str:
    """The mark of the run's totals. The clock does not change it."""
    state = {name: value for name, value in fields_of(part["progress"]).items() if name not in _MOVING}
    return mark_of(part["run"], state, part["resumable"])


def figures_part(run: Run, wanted: ListQuery) -> dict[str, Any]:
    """Findings by kind, rewards, and why trajectories ended."""
    summary = summary_of(run)
    kinds = finding_choices(summary, wanted, run.n_ended, muted_in(run))
    return {
        "summary": summary,
        "chart": histogram(summary),
        "kinds": kinds[:TOP_KINDS],
        "more_kinds": kinds[TOP_KINDS:],
        "more_open": any(kind.chosen for kind in kinds[TOP_KINDS:]),
        "failures": list(failure_reasons(run).items())[:MAX_REASONS],
        "by_severity": findings_sentences(summary),
        "all_clear": all_clear(summary.checks),
        "check_sentence": check_sentence(summary.checks),
        "stops": stop_choices(summary, wanted),
    }


def list_page(run: Run, wanted: ListQuery) -> ListPart[StoredTrajectory]:
    """One part of the run's trajectories. While a launch works, queued trajectories are left out. One query."""
    return list_trajectories(run, _listed(run, wanted), wanted.sort, wanted.after, TRAJECTORIES_PER_PAGE)


def _listed(run: Run, wanted: ListQuery) -> ListQuery:
    is_filling = run.kind == Run.Kind.LAUNCH and is_active(run)
    return wanted.model_copy(update={"hide_queued": is_filling and not wanted.status})


def place_part(
    run: Run, wanted: ListQuery, found: ListPart[StoredTrajectory], queued: int, summary: RunSummary | None = None,
) -> dict[str, Any]:
    """How many trajectories pass the filter, and the place of the first line among them, from 1. None = more than are
    counted. At most three queries, none for the first page where a total of the run tells it. ``queued``: the
    trajectories that nobody has begun."""
    listed = _listed(run, wanted)
    if listed.model_copy(update={"hide_queued": False}).pass_all:
        total: int | None = run.n_trajectories - queued * listed.hide_queued
    else:
        total = _known_total(listed, summary) if summary is not None else None
    if total is None:
        counted = count_trajectories(run, listed)
        total = counted if counted <= MAX_COUNTED else None
    before = count_before(found[0][0], listed, wanted.sort) if wanted.after and found[0] else 0
    return {"total": total, "first": before + 1 if before <= MAX_COUNTED or listed.pass_all else None}


def _known_total(listed: ListQuery, summary: RunSummary) -> int | None:
    """The total of a filter by one thing that the figures count."""
    by_one = {"kind": summary.finding_trajectories, "status": summary.by_status, "stop_reason": summary.stop_reasons}
    for name, counts in by_one.items():
        if (value := getattr(listed, name)) and listed.model_copy(update={name: ""}).pass_all:
            return counts.get(value, 0)
    return None


def list_part(run: Run, wanted: ListQuery, found: ListPart[StoredTrajectory], reader: int | None) -> dict[str, Any]:
    """The lines of the list. ``reader``: the key of the user who asks; None = a visitor. Four queries, or two."""
    groups = group_stats(run, sorted({item.group for item in found[0] if item.group}))
    kinds = finding_kinds(found[0])
    comments = count_comments(found[0]) if reader is not None else None
    seen_keys = seen_among(found[0], reader) if reader is not None else None
    query, tokenizer = wanted.query(), run.tokenizer.name if run.tokenizer else None
    lines = [
        TrajectoryValues.of(
            item, run, query, tokenizer=tokenizer, kinds=kinds.get(item.pk, {}),
            group_url=group_url(run.code, item.group) if item.group else "",
            comments=None if comments is None else comments.get(item.pk, (0, 0))[0],
            open_comments=None if comments is None else comments.get(item.pk, (0, 0))[1],
            seen=None if seen_keys is None else item.pk in seen_keys,
            zero_variance=item.group in groups and is_flat(groups[item.group], is_active(run)),
        )
        for item in found[0]
    ]
    return {"trajectories": lines, "next": found[1]}


def list_frame(wanted: ListQuery, lines: list[TrajectoryValues]) -> dict[str, Any]:
    """What the list needs beside its lines: the columns that have values, their heads, and the filters that are set."""
    names = {"said": "prompt_line", "training": "training_step", "ended": "status", "calls": "steps", "index": "code"}
    columns = [
        name for name in wanted.shown if any(getattr(line, names.get(name, name)) not in (None, "") for line in lines)
    ]
    return {
        "shown": columns, "heads": wanted.heads(columns), "chips": wanted.chips(), "page_size": TRAJECTORIES_PER_PAGE,
        "most_counted": MAX_COUNTED,
    }


@dataclass(frozen=True)
class Had:
    """The marks of the parts that a page shows, and the time at which figures and list were last read."""

    progress: str = ""
    figures: str = ""
    list: str = ""
    looked_at: int = 0

    @classmethod
    def read(cls, text: str) -> Had:
        parts = text.split(".")
        looked_at = whole_number(parts[-1], 11)
        if len(parts) != 4 or looked_at is None:
            return cls()
        return cls(parts[0], parts[1], parts[2], looked_at)

    @property
    def is_old(self) -> bool:
        return not 0 <= time.time() - self.looked_at < LOOK_SECONDS

    def url(self, run: Run, wanted: ListQuery) -> str:
        """The address that the page asks next."""
        have = f"{self.progress}.{self.figures}.{self.list}.{self.looked_at}"
        return reverse("run", args=[run.code]) + wanted.query(after=wanted.after, have=have)


def all_of(run: Run, part: dict[str, Any], found: ListPart[StoredTrajectory]) -> Had:
    """The marks of a page that shows everything. Its figures change with ends and findings alone."""
    totals = run.n_trajectories, run.n_finished, run.n_failed, run.n_rewards, run.reward_sum
    lines = [[getattr(item, name) for name in _MARKED_FIELDS] for item in found[0]]
    figures = mark_of(totals, sorted(run.finding_counts.items()))
    return Had(progress_mark(part), figures, mark_of(found[1], lines), int(time.time()))


def answer(request: HttpRequest, run: Run, wanted: ListQuery) -> HttpResponse:
    """The parts that changed since the page was drawn."""
    if not is_active(run) and "have" in request.GET:
        # The run has just ended: load the whole page again, because an ended run shows more.
        return HttpResponse(headers={"HX-Refresh": "true"})
    had = Had.read(request.GET.get("have", ""))
    part = progress_part(run)
    now, part_of_list = replace(had, progress=progress_mark(part)), None
    # Progress, figures and list are read together, so that they tell the same second. Those of a large run cost more.
    if had.is_old or (now.progress != had.progress and not is_large(run)):
        part_of_list = list_page(run, wanted)
        now = all_of(run, part, part_of_list)
    if (now.progress, now.figures, now.list) == (had.progress, had.figures, had.list):
        return nothing_new()
    part |= {"refusal": refusal(run), "filter": wanted, "live_url": now.url(run, wanted), "muted_kinds": muted_in(run)}
    if now.figures != had.figures:
        muted = [rule for rule in muted_values(request, run) if rule.kind in run.finding_counts]
        part |= {**figures_part(run, wanted), "new_figures": True, "muted": muted}
    if part_of_list is not None and now.list != had.list:
        part |= {
            **list_part(run, wanted, part_of_list, reader_of(request)),
            **place_part(run, wanted, part_of_list, part["progress"].queued),
            "new_list": True,
        }
        part |= list_frame(wanted, part["trajectories"])
    return render(request, "runs/_changed.html", part)
