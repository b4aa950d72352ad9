"""The page of a run: all of it, or the list of jobs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from inspector.html.inspector_tags import any_has, finding_title, kind_words
from inspector.runs import live_parts as parts
from inspector.runs.filters import PERSONAL, FilterControl, ListQuery, filter_form
from inspector.runs.jobs import JobLine, has_just_diagnosed, listed_kinds
from inspector.runs.launches.template_refusal import refusal
from inspector.runs.muted import muted_values
from inspector.runs.pages import RejectedLine, RunPage, RunValues, ShownRun
from inspector.runs.training.alarm_values import alarm_values
from inspector.runs.training.gap_causes import gap_causes
from inspector.runs.values import settings_words, tokenizer_note
from inspector.runs.work_card import work_card
from inspector.web.access import may_delete, may_write, project_name, reader_of
from inspector.web.twins import from_columns, json_page, page, wants_json
from rollouts.jobs.launch import setting_labels
from rollouts.store.chat_templates.chat_templates import chat_template_labels
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.jobs import latest_jobs
from rollouts.store.models import Run, template_name
from rollouts.store.runs.gap import named_causes
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.rejections import list_rejections
from rollouts.store.runs.tags import tags_of
from rollouts.store.trajectories.trajectory_list import MAX_COUNTED

MAX_REJECTIONS = 100
MAX_LINES = 6
"""Numbers of rejected lines that are named for one reason."""


def whole_page(request: HttpRequest, run: Run, wanted: ListQuery) -> HttpResponse:
    """Everything about a run, with one part of its trajectories."""
    shell: dict[str, Any] = parts.progress_part(run) | parts.figures_part(run, wanted)
    found, jobs = parts.list_page(run, wanted), latest_jobs(run, *listed_kinds())
    rejections = list_rejections(run, MAX_REJECTIONS)
    shown = RunPage(
        run=ShownRun.of(run, project=project_name(request, run.project_id)),
        progress=shell["progress"],
        refusal=refusal(run),
        summary=shell["summary"],
        rejections=[from_columns(RejectedLine, one) for one in rejections],
        tokenizer_note=tokenizer_note(run, shell["summary"]),
        tags=tags_of([run]).get(run.pk, []),
        jobs=[JobLine.of(job, run) for job in jobs],
        jobs_live=any(is_active(job) for job in jobs),
        filter={**dict(wanted.pairs()), "sort": wanted.sort},
        queued=shell["progress"].queued,
        notices=wanted.notices,
        muted=[rule for rule in muted_values(request, run) if rule.kind in run.finding_counts],
        alarms=alarm_values(request, run),
        gap_causes=gap_causes(run, named_causes([run]).get(run.pk, [])),
        **parts.list_part(run, wanted, found, reader_of(request)),
        **parts.place_part(run, wanted, found, shell["progress"].queued, shell["summary"]),
    )
    if wants_json(request):
        return json_page(shown)
    only_html = {
        **shell,
        "run": shown.run,
        "filter": wanted,
        "filter_form": _filter_form(wanted, shown, reader_of(request) is not None),
        "rejected_groups": _rejected_groups(shown.rejections),
        "heads": wanted.heads(),
        "above": [one for one in shown.alarms if one.holds],
        "muted_kinds": muted_in(run),
        "most_counted": MAX_COUNTED,
        "settings_words": settings_words(run.settings, setting_labels()),
        "target": run,
        **_template_names(run),
        "deletable": may_delete(request, run),
        "page_size": parts.TRAJECTORIES_PER_PAGE,
        "live_url": parts.all_of(run, shell, found).url(run, wanted),
        **(work_card(run, may_write(request)) if run.n_trajectories and not shell["live"] else {}),
    }
    return page(request, "runs/detail.html", shown, **only_html)


def _filter_form(wanted: ListQuery, shown: RunPage, has_role: bool) -> list[list[FilterControl]]:
    """The form above the list: findings and stop reasons are those of the run."""
    counts = {wanted.kind: 0, **shown.run.findings} if wanted.kind else shown.run.findings
    stops = dict.fromkeys([*shown.summary.stop_reasons, wanted.stop_reason])
    options = {
        "kind": [(kind, f"{finding_title(kind)} ({count:,})") for kind, count in counts.items()],
        "stop_reason": [(reason, kind_words(reason)) for reason in stops if reason],
    }
    absent = [] if any_has(shown.trajectories, "training_step") else ["training_min", "training_max"]
    absent += [] if shown.muted else ["muted"]
    absent += [] if has_role else PERSONAL
    return filter_form(wanted, options, absent)


@dataclass(frozen=True)
class RejectedGroup:
    """Lines of a file that were rejected for one reason."""

    file: str
    reason: str
    times: int
    lines: str
    """Numbers of the first lines; empty = the whole file."""


def _rejected_groups(rejections: Sequence[RejectedLine]) -> list[RejectedGroup]:
    """Each reason once, in the order in which they came."""
    found: dict[tuple[str, str], list[int | None]] = {}
    for one in rejections:
        found.setdefault((one.file, one.reason), []).append(one.line)
    groups = []
    for (file, reason), lines in found.items():
        numbers = [f"{line:,}" for line in lines if line]
        more = f" and {len(numbers) - MAX_LINES:,} more" if len(numbers) > MAX_LINES else ""
        groups.append(RejectedGroup(file, reason, len(lines), "; ".join(numbers[:MAX_LINES]) + more))
    return groups


def _template_names(run: Run) -> dict[str, str]:
    """What the run's project calls its chat templates. One query, or none."""
    shas = {"prompts_template": run.chat_template_id, "rows_template": run.rows_chat_template_id}
    held = [sha256 for sha256 in shas.values() if sha256]
    labels = chat_template_labels(run.project_id, held) if held else {}
    return {name: template_name(labels.get(sha256, ""), sha256) for name, sha256 in shas.items() if sha256}


def jobs_part(request: HttpRequest, run: Run) -> HttpResponse:
    """The list of jobs. When the run was diagnosed a moment ago, the page is loaded again: its findings are others."""
    jobs = latest_jobs(run, *listed_kinds())
    live = any(is_active(job) for job in jobs)
    if not live and any(has_just_diagnosed(job) for job in jobs):
        return HttpResponse(headers={"HX-Refresh": "true"})
    shown = {"run": RunValues.of(run), "jobs": [JobLine.of(job, run) for job in jobs], "jobs_live": live}
    return render(request, "runs/_jobs.html", shown)
