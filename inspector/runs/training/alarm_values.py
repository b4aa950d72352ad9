"""Alarms and limits as pages show them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone

from inspector.web.access import reader_of
from inspector.web.twins import Page
from rollout_inspector.diagnose.alarm_rules import TITLES, AlarmFigure, limit_words
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.jobs.alarm_delivery import sentence_of
from rollouts.store.models import Alarm, AlarmRule, ProjectAlarms, Run
from rollouts.store.runs.alarms import GIVE_UP, alarms_of, alarms_of_project


@dataclass(frozen=True)
class AlarmValues(Page):
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
    first_step: int
    """The first training step above it."""
    last_step: int
    """The last one."""
    n_steps: int
    """Steps above it."""
    worst_step: int
    """The step with the largest value."""
    worst: float
    """That value: a share, or the mean gap in nats."""
    baseline: float | None
    """Of the gap: the median over the first steps, in nats."""
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
        return cls(
            alarm.code, alarm.figure, alarm.kind, _title(alarm.figure, alarm.kind), sentence_of(alarm), alarm.holds,
            alarm.limit, alarm.first_step, alarm.last_step, alarm.n_steps, alarm.worst_step, alarm.worst,
            alarm.baseline, alarm.raised_at, _delivery(alarm, held),
            f"{reverse('run', args=[run.code])}?{of_kind}{step}",
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
    found = alarms_of(run)
    held = alarms_of_project(run.project) if found and run.project and reader_of(request) is not None else None
    return [AlarmValues.of(one, run, held) for one in found]
