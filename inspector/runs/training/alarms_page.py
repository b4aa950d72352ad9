"""`/runs/<code>/alarms`: the limits that hold in a run, where it is above one, and the form that sets a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from inspector.runs.run_values import OfRun, RunValues
from inspector.web.access import access, may_write, reader_of, reads_run, require_rule, run_of_form, writes_run
from inspector.web.twins import Page, from_columns, json_page, page, told, wants_json
from rollout_inspector.diagnose.alarm_rules import (
    FIRST_STEPS, MIN_GAP, MIN_GROUPS, MIN_TRAJECTORIES, TITLES, AlarmFigure, Raised, limit_words
)
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.jobs.alarm_delivery import sentence_of
from rollouts.store.models import Alarm, AlarmRule, ProjectAlarms, Role, Run
from rollouts.store.runs.alarms import (
    GIVE_UP, alarms_of, alarms_of_project, count_alarm_steps, drop_limit, find_alarm_rule, limits_in, set_limit
)


@dataclass(frozen=True)
class AlarmValues(Raised, Page):
    """A run is above a limit, or was."""

    code: str
    """Names it in its delivery."""
    figure: str
    """``broken``, ``finding``, ``gap``, ``truncated`` or ``same_reward``."""
    kind: str
    """Of the findings; empty for every other figure."""
    title: str
    """The figure in words."""
    sentence: str
    """Since which step, how far above the limit, and for how many steps."""
    holds: bool
    """False: no step is above the limit any more."""
    limit: float
    """A share from 0 to 1; of the gap a multiple of its first steps."""
    raised_at: datetime
    """When it was raised."""
    delivery: str
    """What came of telling the webhook; empty without one, and for whoever has no role in the project."""
    url: str
    """Address of the trajectories of the first step."""

    @classmethod
    def of(cls, alarm: Alarm, run: Run, held: ProjectAlarms | None) -> AlarmValues:
        """``held``: where the project is told, for a reader who may know."""
        of_kind = f"finding={alarm.kind}&" if alarm.kind else "severity=error&" if alarm.figure == "broken" else ""
        step = f"training_min={alarm.first_step}&training_max={alarm.first_step}"
        return from_columns(
            cls, alarm, title=_title(alarm.figure, alarm.kind), sentence=sentence_of(alarm),
            delivery=_delivery(alarm, held), url=f"{reverse('run', args=[run.code])}?{of_kind}{step}",
        )


@dataclass(frozen=True)
class LimitLine(Page):
    """The limit of a figure that holds in the run."""

    id: int | None
    """Names the rule in addresses; null = the default."""
    figure: str
    """``broken``, ``finding``, ``gap``, ``truncated`` or ``same_reward``."""
    kind: str
    """Of the findings; empty for every other figure."""
    title: str
    """The figure in words."""
    limit: float | None
    """A share from 0 to 1, or a multiple of the first steps; null = the alarm is switched off."""
    words: str
    """The limit in words."""
    scope: str
    """Who says so: ``run``, ``project`` or ``default``."""
    author: str | None
    """Who set it; null for the default, and for the visitor of a share link."""

    @classmethod
    def of(cls, rule: AlarmRule, is_member: bool) -> LimitLine:
        figure = AlarmFigure(rule.figure)
        return cls(
            rule.pk, rule.figure, rule.kind, _title(figure, rule.kind),
            rule.limit, "off" if rule.limit is None else limit_words(figure, rule.limit), rule.scope,
            rule.author_name if rule.pk is not None and is_member else None,
        )


def _title(figure: str, kind: str) -> str:
    if kind:
        return f"Trajectories with “{KINDS[kind].title if kind in KINDS else kind}”"
    return TITLES[AlarmFigure(figure)] if figure in set(AlarmFigure) else figure


def _delivery(alarm: Alarm, held: ProjectAlarms | None) -> str:
    if held is None or not held.webhook or held.since is None or alarm.raised_at < held.since:
        return "The webhook took it." if held is not None and alarm.delivered_at else ""
    if alarm.delivered_at:
        return "The webhook took it."
    if timezone.now() - alarm.raised_at > GIVE_UP:
        return f"It was not delivered, and is tried no more. {alarm.error}".strip()
    if alarm.error:
        return f"Tried {alarm.n_tries} times. {alarm.error}" if alarm.n_tries > 1 else f"Tried once. {alarm.error}"
    return f"It waits. {held.error}" if held.error else "It is on its way."


def alarm_values(request: HttpRequest, run: Run) -> list[AlarmValues]:
    """The alarms of a run. Two queries at most."""
    alarms = alarms_of(run)
    told_project = alarms_of_project(run.project) if alarms and run.project and reader_of(request) is not None else None
    return [AlarmValues.of(alarm, run, told_project) for alarm in alarms]


@dataclass(frozen=True)
class AlarmsPage(OfRun):
    """The alarms of a run."""

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
    return AlarmsPage(RunValues.of(run), alarm_values(request, run), limits, count_alarm_steps(run), dict(errors or {}))


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
    twin = {"id": rule.pk, "figure": rule.figure, "kind": rule.kind, "limit": rule.limit}
    sentence = "The limit is set. A worker checks the stored figures by it in a few seconds."
    return told(request, sentence, "run-alarms", run.code, twin=twin, status=201)


@require_POST
def drop_alarm(request: HttpRequest, pk: int) -> HttpResponse:
    """Take a limit back: the project's, or the default, holds again."""
    rule = require_rule(request, find_alarm_rule(pk), "limit")
    drop_limit(rule)
    run = run_of_form(request, rule)
    back = ("project-alarms", rule.project.code) if run is None else ("run-alarms", run.code)
    sentence = "The limit was taken back. A worker checks the stored figures again in a few seconds."
    return told(request, sentence, *back, twin={"dropped": rule.figure})
