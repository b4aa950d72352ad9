"""Alarms over the training steps of runs: limits, what is above one, and where a project is told."""

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from rollouts.store.models.codes import new_code
from rollouts.store.models.people import Project
from rollouts.store.models.runs import Run


class AlarmRule(models.Model):
    """A limit of a figure in one run or in a project. It takes the place of the project's limit, or of the default."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="+", help_text="null = of any run.")
    figure = models.CharField(max_length=20, help_text="A value of rollout_inspector.diagnose.alarm_rules.AlarmFigure.")
    kind = models.CharField(max_length=40, blank=True, help_text="Of the findings, for the figure “finding” alone.")
    limit = models.FloatField(null=True, help_text="null = the alarm is switched off.")
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(max_length=150, help_text="It stays when the account goes.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["project", "figure", "kind"], condition=Q(run=None), name="alarm_rule_of_project"
            ),
            models.UniqueConstraint(fields=["run", "figure", "kind"], name="alarm_rule_of_run"),
        ]

    @property
    def scope(self) -> str:
        """Who says so: ``run``, ``project`` or, where the rule is not stored, ``default``."""
        return "default" if self.pk is None else "project" if self.run_id is None else "run"


class Alarm(models.Model):
    """A run was above a limit. There is one for a figure and kind of a run, however often it is checked again."""

    code = models.CharField(max_length=16, unique=True, default=new_code, help_text="Names its delivery.")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="alarms")
    figure = models.CharField(max_length=20)
    kind = models.CharField(max_length=40, blank=True)
    holds = models.BooleanField(default=True, help_text="False = no step is above the limit any more.")
    limit = models.FloatField()
    first_step = models.PositiveIntegerField()
    last_step = models.PositiveIntegerField()
    n_steps = models.PositiveIntegerField()
    worst_step = models.PositiveIntegerField()
    worst = models.FloatField()
    baseline = models.FloatField(null=True)
    raised_at = models.DateTimeField(default=timezone.now)
    n_tries = models.PositiveIntegerField(default=0, help_text="How often its delivery was tried.")
    delivered_at = models.DateTimeField(null=True, help_text="null = the webhook has not taken it.")
    error = models.CharField(max_length=300, blank=True, help_text="Why the last try failed.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "figure", "kind"], name="alarm_of_figure")]
        indexes = [
            # What is still to be delivered, among many alarms.
            models.Index(fields=["raised_at"], name="alarm_waits", condition=Q(delivered_at=None, holds=True)),
        ]


class ProjectAlarms(models.Model):
    """Where a project is told of its alarms, and whether a change of its rules was checked."""

    project = models.OneToOneField(Project, on_delete=models.CASCADE, related_name="alarms")
    webhook = models.CharField(max_length=500, blank=True, help_text="Address that takes a POST; empty = none.")
    salt = models.CharField(max_length=16, default=new_code, help_text="Makes the key of its signatures another one.")
    since = models.DateTimeField(null=True, help_text="Alarms before it are not delivered.")
    n_failures = models.PositiveIntegerField(default=0, help_text="Tries that failed since the last one that did not.")
    next_try_at = models.DateTimeField(default=timezone.now)
    error = models.CharField(max_length=300, blank=True)
    delivered_at = models.DateTimeField(null=True)
    rules_changed_at = models.DateTimeField(null=True)
    checked_at = models.DateTimeField(null=True, help_text="Every run was checked by the rules as they were then.")
