"""The page of a run: all of it, or the list of jobs alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from inspector.html.inspector_tags import finding_title
from inspector.runs import live_parts as parts
from inspector.runs.filters import COLUMNS, ORDERS, ListQuery, search_words
from inspector.runs.jobs.job_values import JobValues, has_just_diagnosed, listed_kinds
from inspector.runs.launches.template_refusal import TemplateRefusal, refusal
from inspector.runs.muted import MutedValues, muted_values
from inspector.runs.progress import Progress
from inspector.runs.run_values import BOOKKEEPING, RunValues, ShownRun
from inspector.runs.training.alarms_page import AlarmValues, alarm_values
from inspector.runs.training.gap_causes import GapCauseValues, gap_causes
from inspector.runs.trajectory_values import TrajectoryValues
from inspector.web.access import may_delete, may_write, project_name, reader_of
from inspector.web.twins import Page, json_page, page, wants_json
from rollout_inspector.diagnose import VERSION
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs.exports.exports import WRITERS, is_rows, title_of
from rollouts.jobs.launch import served_models, setting_labels
from rollouts.sampling.engines import scoring_engines
from rollouts.store.chat_templates.chat_templates import chat_template_labels
from rollouts.store.chat_templates.tokenizers import tokenizer_names
from rollouts.store.jobs.jobs import is_active, latest_jobs
from rollouts.store.models import Run, template_name
from rollouts.store.parameters import MAX_TEXT
from rollouts.store.runs.imports import list_rejections
from rollouts.store.runs.logprob_columns import named_causes
from rollouts.store.runs.muted import muted_in
from rollouts.store.runs.run_summary import RunSummary
from rollouts.store.runs.runs import tags_of

MAX_REJECTIONS = 100
MAX_LINES = 6  # Numbers of rejected lines that are named for one reason.


@dataclass(frozen=True)
class RunPage(Page):
    """One run: progress, figures, what can be done to it, and one part of its trajectories."""

    run: ShownRun
    """The run and its origin."""
    progress: Progress
    """Done of total, rate, remaining seconds, and the sentence that says why nothing moves."""
    refusal: TemplateRefusal | None
    """Of a launch whose chat template was refused: the finding, and its repair."""
    summary: RunSummary
    """Counts, rewards, findings by kind."""
    rejections: list[dict[str, Any]]
    """``file``, ``line`` (null = the whole file) and ``reason`` of the first lines that could not be read."""
    tokenizer_note: str
    """That ids cannot be read as text; empty while all is well."""
    tags: list[str]
    """By name."""
    jobs: list[JobValues]
    """Work that was asked for on the run, the newest first."""
    jobs_live: bool
    """One of these jobs still changes."""
    filter: dict[str, str]
    """The parameters that say which trajectories are listed, and ``sort``."""
    queued: int
    """Trajectories that nobody has begun; while a launch works the list leaves them out."""
    muted: list[MutedValues]
    """The rules that mute kinds of findings in this run; what they mute counts in every figure."""
    alarms: list[AlarmValues]
    """The limits of its training steps that the run is above, and those that it was above."""
    gap_causes: list[GapCauseValues]
    """The causes of its gap between trainer and sampler; empty where none is named or no worker has read it."""
    trajectories: list[TrajectoryValues]
    """One part of the list."""
    next: str | None
    """What ``after`` takes for the following part; None on the last."""
    total: int | None
    """How many trajectories pass the filter; None = more than are counted."""
    first: int | None
    """Place of the first line among them, from 1; None = further on than is counted."""
    notices: tuple[str, ...]
    """Sentences about parameters that were left out because they made no sense."""


def whole_page(request: HttpRequest, run: Run, wanted: ListQuery) -> HttpResponse:
    """Everything about a run, with one part of its trajectories."""
    shell: dict[str, Any] = parts.progress_part(run) | parts.figures_part(run, wanted)
    list_part, jobs = parts.list_page(run, wanted), latest_jobs(run, *listed_kinds())
    rejections = list_rejections(run, MAX_REJECTIONS)
    data = RunPage(
        run=ShownRun.of(run, project=project_name(request, run.project_id)), progress=shell["progress"],
        refusal=refusal(run), summary=shell["summary"],
        rejections=[{"file": line.file, "line": line.line, "reason": line.reason} for line in rejections],
        tokenizer_note=tokenizer_note(run, shell["summary"]), tags=tags_of([run]).get(run.pk, []),
        jobs=[JobValues.of(job, run) for job in jobs], jobs_live=any(is_active(job) for job in jobs),
        filter={**dict(wanted.pairs()), "sort": wanted.sort}, queued=shell["progress"].queued, notices=wanted.notices,
        muted=[rule for rule in muted_values(request, run) if rule.kind in run.finding_counts],
        alarms=alarm_values(request, run), gap_causes=gap_causes(run, named_causes([run]).get(run.pk, [])),
        **parts.list_part(run, wanted, list_part, reader_of(request)),
        **parts.place_part(run, wanted, list_part, shell["progress"].queued, shell["summary"]),
    )
    if wants_json(request):
        return json_page(data)
    only_html = {
        **shell,
        "run": data.run,
        "filter": wanted,
        "asked": request.GET.get("q", "")[:MAX_TEXT],
        "search_words": search_words(reader_of(request) is not None),
        "suggestions": _suggestions(data),
        "all_columns": [(name, column.label) for name, column in COLUMNS.items() if name != "index"],
        "orders": ORDERS,
        "rejected_groups": _rejected_groups(data.rejections),
        "above": [alarm for alarm in data.alarms if alarm.holds],
        "muted_kinds": muted_in(run),
        **parts.list_frame(wanted, data.trajectories),
        "settings_words": settings_words(run.settings, setting_labels()),
        "target": run,
        **_template_names(run),
        "deletable": may_delete(request, run),
        "live_url": parts.all_of(run, shell, list_part).url(run, wanted),
        **(work_card(run, may_write(request)) if run.n_trajectories and not shell["live"] else {}),
    }
    return page(request, "runs/detail.html", data, **only_html)


def _suggestions(shown: RunPage) -> list[tuple[str, str]]:
    """(what one may type, its words) of the findings and ends that the run has."""
    kinds = [(f"kind:{kind}", f"{finding_title(kind)} ({count:,})") for kind, count in shown.run.findings.items()]
    reasons = shown.summary.stop_reasons.items()
    stops = [(f'stop:"{reason}"', f"ended: {reason} ({n:,})") for reason, n in reasons if reason]
    return kinds + stops


def _rejected_groups(rejections: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each file and reason once, in the order in which they came, with the numbers of the first lines in words."""
    lines_by_reason: dict[tuple[str, str], list[int | None]] = {}
    for rejection in rejections:
        lines_by_reason.setdefault((rejection["file"], rejection["reason"]), []).append(rejection["line"])
    groups = []
    for (file, reason), lines in lines_by_reason.items():
        numbers = [f"{line:,}" for line in lines if line]
        more = f" and {len(numbers) - MAX_LINES:,} more" if len(numbers) > MAX_LINES else ""
        words = "; ".join(numbers[:MAX_LINES]) + more
        groups.append({"file": file, "reason": reason, "times": len(lines), "lines": words})
    return groups


def tokenizer_note(run: Run, summary: RunSummary) -> str:
    """A sentence when the run has no tokenizer, or probably a wrong one; empty otherwise."""
    if is_active(run) or not run.n_tokens:
        return ""
    if run.tokenizer is None:
        return "No tokenizer: ids are shown as ids, and findings that need text are left open as “Not decidable”."
    if summary.finding_trajectories.get("token_ids_missing") == run.n_trajectories:
        return (
            f"Every trajectory has ids that are missing or outside the vocabulary of the tokenizer "
            f"“{run.tokenizer.name}”. Is it the tokenizer of this model?"
        )
    return ""


def settings_words(settings: Mapping[str, Any], labels: Mapping[str, str]) -> list[tuple[str, Any]]:
    """The settings of a launch as pairs of label and value. Nested values are JSON."""
    return [
        (labels.get(key) or key.replace("_", " ").capitalize(), _word(key, value))
        for key, value in settings.items()
        # Engine and templates are columns of the run. The settings hold only the wish, which may be empty.
        if key not in (*BOOKKEEPING, "engine", "chat_template", "rows_chat_template")
        and value not in ("", [], {}, None)
    ]


def _word(key: str, value: Any) -> Any:
    if key in ("compare", "strategy"):
        return str(value).replace("_", " ")
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _template_names(run: Run) -> dict[str, str]:
    """What the run's project calls its chat templates. One query, or none."""
    shas = {"prompts_template": run.chat_template_id, "rows_template": run.rows_chat_template_id}
    hashes = [sha256 for sha256 in shas.values() if sha256]
    labels = chat_template_labels(run.project_id, hashes) if hashes else {}
    return {name: template_name(labels.get(sha256, ""), sha256) for name, sha256 in shas.items() if sha256}


def jobs_part(request: HttpRequest, run: Run) -> HttpResponse:
    """The list of jobs. When the run was diagnosed a moment ago, the page is loaded again: its findings are others."""
    jobs = latest_jobs(run, *listed_kinds())
    live = any(is_active(job) for job in jobs)
    if not live and any(has_just_diagnosed(job) for job in jobs):
        return HttpResponse(headers={"HX-Refresh": "true"})
    context = {"run": RunValues.of(run), "jobs": [JobValues.of(job, run) for job in jobs], "jobs_live": live}
    return render(request, "runs/_jobs.html", context)


MAX_TOKENIZERS = 500


def work_card(run: Run, writer: bool) -> dict[str, Any]:
    """The choices of the export form and, for a writer, of the form that diagnoses the run again. One query."""
    can_replay = writer and run.n_steps and run.tokenizer_id is not None
    return {
        "writers": {
            "whole trajectories": [(name, title_of(name)) for name in WRITERS if not is_rows(name)],
            "training rows": [(name, title_of(name)) for name in WRITERS if is_rows(name)],
        },
        "strategies": {slug: spec.about for slug, spec in STRATEGIES.items()} if can_replay else {},
        "version": VERSION,
        "outdated": run.diagnosis_version is not None and run.diagnosis_version < VERSION,
        "models": {name: spec.engine for name, spec in served_models().items()} if writer else {},
        "engines": scoring_engines() if writer else [],
        "tokenizers": tokenizer_names(run.project_id, MAX_TOKENIZERS) if writer else [],
    }
