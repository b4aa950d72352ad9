"""`/`, the list of runs, `/runs/<code>` and what can be done to a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.runs import live_parts as parts
from inspector.runs.filters import ListQuery
from inspector.runs.launches.template_refusal import refusal
from inspector.runs.run_page import jobs_part, whole_page
from inspector.runs.run_values import ListedRun, RunValues
from inspector.runs.training.gap_causes import gap_causes
from inspector.web.access import (
    access, may_delete, project_name, projects_to_filter, reader_of, reads_run, require, writes_run
)
from inspector.web.twins import Page, is_fragment, json_page, page, told, wants_json
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.jobs import run_actions
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Role, Run
from rollouts.store.parameters import SEVERITIES, STATUSES
from rollouts.store.runs.alarms import count_alarms
from rollouts.store.runs.figures import severities_of
from rollouts.store.runs.logprob_columns import named_causes
from rollouts.store.runs.muted import muted_in_runs
from rollouts.store.runs.runs import RunFilters, RunTotals, known_tags, tags_of, total_runs, visible_runs

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


RUNS_PER_PAGE = 25
NO_PROJECT = "You are in no project yet, so there is nothing to see here. Ask an admin of a project to invite you."
MAX_TAGS = 200  # Tags that the filter of the list offers.


@require_safe
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """Runs, newest first. `?text=`, `?status=`, `?kind=`, `?project=`, `?tag=` filter; `?after=`: `next` of a part."""
    names = ("text", "status", "kind", "project", "tag", "after")
    params = {name: request.GET.get(name, "").replace("\0", "")[:200] for name in names}
    notices = []
    for name, names_of in (("status", Run.Status.values), ("kind", Run.Kind.values)):
        if params[name] and params[name] not in names_of:
            notices.append(f"There is no {name} “{params[name][:40]}”; it was left out. Known: {', '.join(names_of)}.")
            params[name] = ""
    if not (access(request).is_server_admin or access(request).roles):
        notices.append(NO_PROJECT)
    filters = RunFilters(params["text"], params["status"], params["kind"], params["project"], params["tag"])
    try:
        runs, following = visible_runs(access(request), filters, params["after"], RUNS_PER_PAGE)
    except ValueError:  # an address that was cut short shows the newest
        runs, following = visible_runs(access(request), filters, "", RUNS_PER_PAGE)
    severities, tags, muted = severities_of(runs), tags_of(runs), muted_in_runs(runs)
    alarms, causes = count_alarms(runs), named_causes(runs)
    data = RunsPage(
        runs=[
            ListedRun.of(
                run, project_code=run.project.code, project=project_name(request, run.project_id),
                worst=next(iter(severities.get(run.pk, {}).items()), None), severities=severities.get(run.pk, {}),
                top_cause=top_cause(
                    {kind: n for kind, n in run.finding_counts.items() if kind not in muted[run.pk]},
                    next(iter(severities.get(run.pk, {})), ""),
                ),
                muted=sorted(kind for kind, n in run.finding_counts.items() if n and kind in muted[run.pk]),
                tags=tags.get(run.pk, []), alarms=alarms.get(run.pk, 0),
                gap_causes=gap_causes(run, causes.get(run.pk, [])),
            )
            for run in runs
        ],
        next=following,
        totals=total_runs(access(request), filters),
        notices=notices,
    )
    filtered = any(params[name] for name in ("text", "status", "kind", "project", "tag"))
    live = any(is_active(run) for run in runs)
    mark = parts.mark_of(data)
    polled = is_fragment(request, "runs")
    if polled and mark == request.GET.get("have"):
        return parts.nothing_new()
    template = "runs/_table.html" if polled else "runs/index.html"
    return page(
        request, template, data, asked=params, filtered=filtered, statuses=STATUSES, live=live, mark=mark,
        projects=projects_to_filter(request),
        known_tags=known_tags(access(request), MAX_TAGS),
        lines=[(run, severity_bar(run)) for run in data.runs],
    )


@reads_run
@never_cache
def detail(request: HttpRequest, run: Run) -> HttpResponse:
    """One run, or one of its parts where htmx asks for that alone."""
    query = ListQuery.read(request.GET, reader_of(request), request.GET.get("q", ""))
    if is_fragment(request, "run-live"):
        return parts.answer(request, run, query)
    if is_fragment(request, "refusal"):
        return render(request, "runs/_refusal.html", {"run": RunValues.of(run), "refusal": refusal(run)})
    if is_fragment(request, "run-jobs"):
        return jobs_part(request, run)
    if "q" in request.GET and not query.notices and not wants_json(request):
        return redirect(reverse("run", args=[run.code]) + query.list_query())  # the address says what the words meant
    return whole_page(request, run, query)


@writes_run
def cancel(request: HttpRequest, run: Run) -> HttpResponse:
    """Ask a run to stop."""
    run_actions.cancel(run)
    return json_page(RunValues.of(run)) if wants_json(request) else redirect("run", run.code)


@writes_run
def resume(request: HttpRequest, run: Run) -> HttpResponse:
    """Continue a run that stopped before its end. What is stored is neither sampled nor read again."""
    try:
        run_actions.resume(run)
    except ValueError as refusal:
        return told(request, str(refusal), "run", run.code, twin={"error": str(refusal)}, status=409)
    return json_page(RunValues.of(run)) if wants_json(request) else redirect("run", run.code)


@writes_run
def delete(request: HttpRequest, run: Run) -> HttpResponse:
    """Remove a run with everything in it; one that still works is cancelled first. The form has a box to tick. A member
    deletes what they made; an admin of the project deletes what others made too."""
    if not may_delete(request, run):
        require(request, run, Role.ADMIN)
    if request.POST.get("sure") != "yes":
        sentence = "Nothing was deleted: tick the box beside the button first."
        return told(request, sentence, "run", run.code, status=422)
    run_actions.delete(run)
    return told(request, f"The run “{run.name}” was deleted.", "runs")
