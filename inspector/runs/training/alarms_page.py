"""`/runs/<code>/alarms`: the limits that hold in a run, where it is above one, and the form that sets a limit."""

from collections.abc import Mapping
from dataclasses import dataclass

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from inspector.runs.run_values import RunValues
from inspector.runs.training.alarm_values import AlarmValues, LimitLine, alarm_values
from inspector.web.access import access, may_write, reader_of, reads_run, require_rule, run_of_form, writes_run
from inspector.web.twins import Page, json_page, page, wants_json
from rollout_inspector.diagnose.alarm_rules import (
    FIRST_STEPS, MIN_GAP, MIN_GROUPS, MIN_TRAJECTORIES, TITLES, AlarmFigure
)
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Role, Run
from rollouts.store.runs.alarms import count_alarm_steps, drop_limit, find_alarm_rule, limits_in, set_limit


@dataclass(frozen=True)
class AlarmsPage(Page):
    """The alarms of a run."""

    run: RunValues
    """The run."""
    alarms: list[AlarmValues]
    """Those that hold first, each by its first step."""
    limits: list[LimitLine]
    """What holds in the run: its own limits before those of its project, and these before the defaults."""
    steps: int
    """Training steps of which figures are stored. A run without any is not checked."""
    errors: dict[str, list[str]]
    """Field of the form -> what is wrong with it."""


@reads_run
def alarms(request: HttpRequest, run: Run) -> HttpResponse:
    """The alarms and limits of a run. Nothing is checked here: a worker does that."""
    return _page(request, run, {}, {})


def alarms_of_run(request: HttpRequest, run: Run, errors: Mapping[str, list[str]] | None = None) -> AlarmsPage:
    """The alarms of a run, the limits that hold in it, and what is wrong with the form."""
    is_member = reader_of(request) is not None
    limits = [LimitLine.of(figure, is_member) for figure in limits_in(run)]
    return AlarmsPage(
        RunValues.of(run), alarm_values(request, run), limits, count_alarm_steps(run), dict(errors or {})
    )


def _page(
    request: HttpRequest, run: Run, errors: Mapping[str, list[str]], typed: Mapping[str, str], status: int = 200
) -> HttpResponse:
    data = alarms_of_run(request, run, errors)
    return page(
        request, "runs/alarms.html", data, status, typed=typed,
        figures=[(figure.value, TITLES[figure]) for figure in AlarmFigure],
        kinds=[(slug, kind.title) for slug, kind in KINDS.items()], project=run.project, first_steps=FIRST_STEPS,
        min_trajectories=MIN_TRAJECTORIES, min_groups=MIN_GROUPS, min_gap=MIN_GAP,
        is_admin=access(request).may(run.project_id, Role.ADMIN) and may_write(request),
    )


@writes_run
def set_alarm(request: HttpRequest, run: Run) -> HttpResponse:
    """Set a limit: ``figure``, ``kind``, ``limit`` (empty = off) and ``scope`` (``run`` or ``project``)."""
    typed = {name: request.POST.get(name, "")[:200] for name in ("figure", "kind", "limit", "scope")}
    try:
        rule = set_limit(run, typed["figure"], typed["kind"], typed["limit"], typed["scope"], request.user)
    except Refusal as refusal:
        errors = {refusal.field: [str(refusal)]}
        if wants_json(request):
            return json_page({"errors": errors}, 422)
        return _page(request, run, errors, typed, 422)
    if wants_json(request):
        return json_page({"id": rule.pk, "figure": rule.figure, "kind": rule.kind, "limit": rule.limit}, 201)
    messages.success(request, "The limit is set. A worker checks the stored figures by it in a few seconds.")
    return redirect("run-alarms", run.code)


@require_POST
def drop_alarm(request: HttpRequest, pk: int) -> HttpResponse:
    """Take a limit back: the project's, or the default, holds again."""
    rule = require_rule(request, find_alarm_rule(pk), "limit")
    drop_limit(rule)
    if wants_json(request):
        return json_page({"dropped": rule.figure})
    messages.success(request, "The limit was taken back. A worker checks the stored figures again in a few seconds.")
    run = run_of_form(request, rule)
    return redirect("project-alarms", rule.project.code) if run is None else redirect("run-alarms", run.code)
