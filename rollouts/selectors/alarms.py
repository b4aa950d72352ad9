"""Alarms: the limits that hold in a run, and the runs that are above one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, JSONField, Q, QuerySet, Value

from rollouts.models import Alarm, AlarmRule, Project, ProjectAlarms, Run, TrainingStepFigures
from rollouts.tito.alarm_rules import DEFAULTS, AlarmFigure, AlarmStep

GIVE_UP = timedelta(days=3)
"""An alarm that the webhook has not taken for so long is not delivered any more."""


@dataclass(frozen=True)
class HeldLimit:
    """The limit of a figure that holds in a run or in a project."""

    figure: AlarmFigure
    kind: str
    """Of the findings; empty for every other figure."""
    limit: float | None
    """None = the alarm is switched off."""
    scope: str
    """Who says so: ``run``, ``project`` or ``default``."""
    rule: AlarmRule | None = None
    """None = the default."""


def limits_in(run: Run) -> list[HeldLimit]:
    """The limits of a run: its own before those of its project, and these before the defaults. One query."""
    return _held(AlarmRule.objects.filter(Q(run=None) | Q(run=run.pk), project=run.project_id))


def limits_of_project(project: Project) -> list[HeldLimit]:
    """The limits of a project's runs that have none of their own. One query."""
    return _held(AlarmRule.objects.filter(project=project, run=None))


def _held(rules: QuerySet[AlarmRule]) -> list[HeldLimit]:
    found: dict[tuple[AlarmFigure, str], HeldLimit] = {
        (figure, ""): HeldLimit(figure, "", limit, "default") for figure, limit in DEFAULTS.items()
    }
    for rule in rules.order_by(F("run").asc(nulls_first=True), "kind"):
        if rule.figure in set(AlarmFigure):  # an older version does not know the figures of a newer one
            figure = AlarmFigure(rule.figure)
            scope = "project" if rule.run_id is None else "run"
            found[figure, rule.kind] = HeldLimit(figure, rule.kind, rule.limit, scope, rule)
    order = list(AlarmFigure)
    return sorted(found.values(), key=lambda one: (order.index(one.figure), one.kind))


def alarm_steps(run: Run, with_kinds: bool = True) -> list[AlarmStep]:
    """The stored figures of a run that alarms look at, in order. One query.

    ``with_kinds``: read the kinds of findings too, which most rules do not look at.
    """
    held: Any = TrainingStepFigures.objects.filter(run=run).order_by("training_step")
    kinds_column = F("finding_counts") if with_kinds else Value(None, output_field=JSONField())
    columns = held.annotate(kinds=kinds_column).values_list(
        "training_step", "n_trajectories", "n_broken", "kinds", "n_truncated", "n_groups", "n_same_reward",
        "gap__mean_abs",
    )
    return [
        AlarmStep(step, n, broken, kinds or {}, cut, groups, same, gap)
        for step, n, broken, kinds, cut, groups, same, gap in columns
    ]


def count_alarm_steps(run: Run) -> int:
    """The training steps of a run of which figures are stored. One query."""
    return TrainingStepFigures.objects.filter(run=run).count()


def alarms_of(run: Run) -> list[Alarm]:
    """The alarms of a run: those that hold first, then by their first step. One query."""
    return list(Alarm.objects.filter(run=run).order_by("-holds", "first_step", "pk"))


def count_alarms(runs: Sequence[Run]) -> dict[int, int]:
    """Key of a run -> its alarms that hold; runs without one are left out. One query."""
    held = Alarm.objects.filter(run__in=runs, holds=True).order_by().values_list("run")
    return dict(held.annotate(n=Count("pk")))


def find_alarm_rule(pk: int) -> AlarmRule | None:
    """A rule with its project and run. One query."""
    return AlarmRule.objects.select_related("project", "run").filter(pk=pk).first()


def alarms_of_project(project: Project) -> ProjectAlarms | None:
    """Where a project is told of its alarms; None = nowhere, and no rule was changed. One query."""
    return ProjectAlarms.objects.filter(project=project).first()


def projects_to_check() -> list[ProjectAlarms]:
    """Projects whose rules were changed since their runs were checked. One query."""
    changed = ProjectAlarms.objects.filter(rules_changed_at__isnull=False)
    stale = Q(checked_at=None) | Q(checked_at__lt=F("rules_changed_at"))
    return list(changed.filter(stale).select_related("project").order_by("pk"))


def runs_to_check(project: Project) -> QuerySet[Run]:
    """The runs of a project that have figures of training steps, the newest first."""
    counted = TrainingStepFigures.objects.filter(run__project=project).order_by().values("run").distinct()
    return Run.objects.filter(pk__in=counted).order_by("-pk")


def waiting_alarms(now: datetime) -> QuerySet[Alarm]:
    """The alarms that a webhook has still to be told of, the oldest first."""
    found = Alarm.objects.filter(
        delivered_at=None, holds=True, raised_at__gt=now - GIVE_UP, raised_at__gte=F("run__project__alarms__since"),
        run__project__alarms__next_try_at__lte=now,
    ).exclude(run__project__alarms__webhook="")
    return found.order_by("raised_at", "pk")
