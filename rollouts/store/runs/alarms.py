"""Alarms: the limits that hold in a run, the check of a run by them, and where a project is told of alarms."""

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from django.conf import settings
from django.db import transaction
from django.db.models import Count, F, JSONField, Q, QuerySet, Value
from django.utils import timezone
from django.utils.crypto import salted_hmac

from rollout_inspector.diagnose.alarm_rules import DEFAULTS, AlarmFigure, AlarmStep, find_raised, limit_words
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.store.models import (
    ACTIVE, Alarm, AlarmRule, Job, Project, ProjectAlarms, Run, TrainingStepFigures, new_code
)
from rollouts.store.people.activity_log import Action, record
from rollouts.store.text import storable_text

GIVE_UP = timedelta(days=3)  # An alarm that the webhook has not taken for so long is not delivered any more.
MAX_RULES = 100  # Rules of a project, those of its runs included.
MAX_ADDRESS = 500  # Characters of the address of a webhook.
MAX_FACTOR = 1e6  # The largest multiple of the first steps that a limit may be.
_PORTS = {"http": 80, "https": 443}


def limits_in(run: Run) -> list[AlarmRule]:
    """The limits of a run: its own before those of its project, and these before the defaults. One query. A default is
    a rule that is not stored."""
    return _in_force(AlarmRule.objects.filter(Q(run=None) | Q(run=run.pk), project=run.project_id))


def limits_of_project(project: Project) -> list[AlarmRule]:
    """The limits of a project's runs that have none of their own. One query."""
    return _in_force(AlarmRule.objects.filter(project=project, run=None))


def _in_force(rules: QuerySet[AlarmRule]) -> list[AlarmRule]:
    limits = {(figure.value, ""): AlarmRule(figure=figure.value, limit=limit) for figure, limit in DEFAULTS.items()}
    for rule in rules.order_by(F("run").asc(nulls_first=True), "kind"):
        limits[rule.figure, rule.kind] = rule
    order = [figure.value for figure in AlarmFigure]
    # An older version does not know the figures of a newer one.
    known = (rule for rule in limits.values() if rule.figure in order)
    return sorted(known, key=lambda rule: (order.index(rule.figure), rule.kind))


def alarm_steps(run: Run, with_kinds: bool = True) -> list[AlarmStep]:
    """The stored figures of a run that alarms look at, in order. One query. ``with_kinds``: read the kinds of findings
    too, which most rules do not look at."""
    figures: Any = TrainingStepFigures.objects.filter(run=run).order_by("training_step")
    kinds_column = F("finding_counts") if with_kinds else Value(None, output_field=JSONField())
    columns = figures.annotate(kinds=kinds_column).values_list(
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
    alarms = Alarm.objects.filter(run__in=runs, holds=True).order_by().values_list("run")
    return dict(alarms.annotate(n=Count("pk")))


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


def waiting_alarms(now: datetime, run: Run | None = None) -> QuerySet[Alarm]:
    """The alarms of a run (None = of all) that a webhook has still to be told of, the oldest first."""
    alarms = Alarm.objects.filter(
        delivered_at=None, holds=True, raised_at__gt=now - GIVE_UP, raised_at__gte=F("run__project__alarms__since"),
        run__project__alarms__next_try_at__lte=now,
    ).exclude(run__project__alarms__webhook="")
    return (alarms if run is None else alarms.filter(run=run)).order_by("raised_at", "pk")


def take_alarms(run: Run) -> None:
    """Check a run by the limits that hold in it, from its stored figures by training step. An alarm is raised once.
    Later it says how far it goes, or that it no longer holds. The caller holds the lock of the run, so that the last of
    two workers that count sees what both have stored."""
    alarms = {(alarm.figure, alarm.kind): alarm for alarm in Alarm.objects.filter(run=run)}
    limits = limits_in(run)
    steps = alarm_steps(run, any(rule.figure == AlarmFigure.FINDING for rule in limits))
    above: set[tuple[str, str]] = set()
    for rule in limits:
        if rule.limit is None:
            continue
        raised = find_raised(AlarmFigure(rule.figure), rule.kind, rule.limit, steps)
        if raised is not None:
            above.add((rule.figure, rule.kind))
            alarm, columns = alarms.get((rule.figure, rule.kind)), {"limit": rule.limit, "holds": True, **vars(raised)}
            if alarm is None:
                Alarm.objects.create(run=run, figure=rule.figure, kind=rule.kind, **columns)
            elif any(getattr(alarm, name) != value for name, value in columns.items()):
                Alarm.objects.filter(pk=alarm.pk).update(**columns)
    over = [alarm.pk for key, alarm in alarms.items() if key not in above and alarm.holds]
    if over:
        Alarm.objects.filter(pk__in=over).update(holds=False)


def take_alarms_again(held: ProjectAlarms) -> None:
    """Check the runs of a project after a change of its rules, the newest first. A worker calls it."""
    changed_at = held.rules_changed_at
    counted = TrainingStepFigures.objects.filter(run__project=held.project).order_by("-run")
    for key in list(counted.values_list("run", flat=True).distinct()):
        with transaction.atomic():
            if (run := Run.objects.select_for_update(no_key=True).filter(pk=key).first()) is not None:
                take_alarms(run)
    # A rule that was changed meanwhile is checked the next time.
    ProjectAlarms.objects.filter(pk=held.pk).update(checked_at=changed_at)


def set_limit(run: Run, figure: str, kind: str, limit: str, scope: str, author: Any) -> AlarmRule:
    """Set the limit of an alarm in a run or its project. ``limit``: as it was typed; empty = it is switched off. A
    share is typed in percent, a gap as a multiple of its first steps. Raises :class:`Refusal`."""
    if scope not in ("run", "project"):
        raise Refusal("Say where it holds: run or project.", field="scope")
    project, of_run = run.project, run if scope == "run" else None
    if figure not in set(AlarmFigure):
        raise Refusal(f"There is no alarm for “{figure[:40]}”. There are: {', '.join(AlarmFigure)}.", field="figure")
    alarm = AlarmFigure(figure)
    if alarm is AlarmFigure.FINDING and kind not in KINDS:
        raise Refusal(f"There is no kind of finding “{kind[:40]}”. /help/findings lists them.", field="kind")
    kind = kind if alarm is AlarmFigure.FINDING else ""
    number = _limit(alarm, limit)
    with transaction.atomic():
        Project.objects.select_for_update(no_key=True).filter(pk=project.pk).first()
        rules = AlarmRule.objects.filter(project=project)
        stored = rules.filter(run=of_run, figure=figure, kind=kind).first()
        if stored is None and rules.count() >= MAX_RULES:
            raise Refusal(f"A project has at most {MAX_RULES} limits. Take one back first.", field="figure")
        rule = stored or AlarmRule(project=project, run=of_run, figure=figure, kind=kind)
        rule.limit, rule.author, rule.author_name = number, author, author.get_username()
        rule.save()
        _note_change(project)
    value = "off" if number is None else limit_words(alarm, number)
    record(Action.ALARM_CHANGED, of_run or project, detail=" ".join(part for part in (figure, kind, value) if part))
    return rule


def _limit(figure: AlarmFigure, typed: str) -> float | None:
    text = typed.strip().removesuffix("%").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if figure is AlarmFigure.GAP:
        if not 1 <= number <= MAX_FACTOR:
            raise Refusal(
                "Write how many times its first steps the gap may be: a number from 1, like 3.", field="limit"
            )
        return number
    if not 0 <= number < 100:
        raise Refusal(
            "Write a percentage from 0 to below 100, like 10. Leave it empty to switch it off.", field="limit"
        )
    return number / 100


def drop_limit(rule: AlarmRule) -> None:
    """Take a limit back: what stood behind it holds again. One that is gone already is nothing to it."""
    if AlarmRule.objects.filter(pk=rule.pk).delete()[0]:
        _note_change(rule.project)
        detail = " ".join(part for part in (rule.figure, rule.kind, "taken back") if part)
        record(Action.ALARM_CHANGED, rule.run or rule.project, detail=detail)


def _note_change(project: Project) -> None:
    ProjectAlarms.objects.update_or_create(project=project, defaults={"rules_changed_at": timezone.now()})


# -- the webhook -------------------------------------------------------------------------------------------------------


def set_webhook(project: Project, address: str) -> ProjectAlarms:
    """Say where a project is told of its alarms from now on; empty = nowhere. Raises :class:`Refusal`."""
    address = storable_text(address).strip()
    if address:
        webhook_parts(address)
    with transaction.atomic():
        alarms, _ = ProjectAlarms.objects.select_for_update().get_or_create(project=project)
        if alarms.webhook == address:
            return alarms
        now = timezone.now()
        alarms.webhook, alarms.salt, alarms.since = address, new_code(), now if address else None
        alarms.n_failures, alarms.next_try_at, alarms.error, alarms.delivered_at = 0, now, "", None
        alarms.save()
    detail = f"to {urlsplit(address).hostname}" if address else "removed"
    record(Action.WEBHOOK_CHANGED, project, detail=detail)
    return alarms


def webhook_parts(address: str) -> SplitResult:
    """The parts of an address. Raises :class:`Refusal` unless it is http(s) to a host that the server allows."""
    if len(address) > MAX_ADDRESS:
        raise Refusal(f"Write at most {MAX_ADDRESS} characters; these are {len(address):,}.", field="webhook")
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    is_plain = address.isascii() and address.isprintable() and not any(c in address for c in " \\")
    if parts.scheme not in _PORTS or not host or "@" in parts.netloc or parts.fragment or not is_plain:
        raise Refusal("That is no address of a webhook. Write it as https://HOST/PATH.", field="webhook")
    host_name = f"[{host}]" if ":" in host else host
    full = f"{host_name}:{port or _PORTS[parts.scheme]}"
    allowed = {name.lower() for name in settings.WEBHOOK_HOSTS}
    # A host without a port is allowed at the usual port of the scheme alone.
    if full in allowed or ((port or _PORTS[parts.scheme]) == _PORTS[parts.scheme] and {host, host_name} & allowed):
        return parts
    way = host_name if port in (None, _PORTS[parts.scheme]) else full
    raise Refusal(
        f"This server tells nothing to {way}. Whoever runs it adds {way} to INSPECTOR_WEBHOOK_HOSTS.", field="webhook"
    )


def webhook_key(held: ProjectAlarms) -> str:
    """The key of the signatures of a project's deliveries: 64 hexadecimal digits. Another address gets another key."""
    return salted_hmac("rollouts.alarms", held.salt, algorithm="sha256").hexdigest()


def note_delivered(alarm: Alarm, held: ProjectAlarms, now: datetime) -> None:
    """The webhook took an alarm."""
    Alarm.objects.filter(pk=alarm.pk).update(delivered_at=now, n_tries=alarm.n_tries + 1, error="")
    ProjectAlarms.objects.filter(pk=held.pk).update(n_failures=0, error="", delivered_at=now, next_try_at=now)


def note_undelivered(alarm: Alarm, held: ProjectAlarms, sentence: str, next_try_at: datetime) -> None:
    """The webhook did not take an alarm; until ``next_try_at`` the project's webhook is not asked again."""
    Alarm.objects.filter(pk=alarm.pk).update(n_tries=alarm.n_tries + 1, error=sentence[:300])
    ProjectAlarms.objects.filter(pk=held.pk, webhook=held.webhook).update(
        n_failures=held.n_failures + 1, error=sentence[:300], next_try_at=next_try_at
    )


def runs_to_tell_of(now: datetime, kind: str) -> list[Run]:
    """A run of each project whose webhook is to be told of an alarm, and that has no job of the ``kind`` under way. Two
    queries."""
    waiting = waiting_alarms(now).select_related("run").order_by("run__project", "raised_at", "pk")
    first: dict[int | None, Run] = {}
    for alarm in waiting[:1000]:
        first.setdefault(alarm.run.project_id, alarm.run)
    active = Job.objects.filter(kind=kind, run__project__in=list(first), status__in=ACTIVE)
    busy = set(active.values_list("run__project", flat=True))
    return [run for project, run in first.items() if project not in busy]
