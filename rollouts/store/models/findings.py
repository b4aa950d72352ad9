"""Findings of the diagnosis."""

from dataclasses import fields

from django.conf import settings
from django.db import models

from rollout_inspector.diagnose.finding import Cost
from rollouts.store.fields import IdsField
from rollouts.store.models.chat_templates import ChatTemplate
from rollouts.store.models.people import Project
from rollouts.store.models.runs import Run
from rollouts.store.models.trajectories import StoredTrajectory


class StoredFinding(models.Model):
    """One finding of the diagnosis."""

    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="findings")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="findings")
    step_index = models.PositiveIntegerField(null=True)
    row_index = models.PositiveIntegerField(null=True)
    axis = models.CharField(max_length=10)
    kind = models.CharField(max_length=40)
    severity = models.CharField(max_length=10)
    start = models.PositiveIntegerField()
    stop = models.PositiveIntegerField()
    expected_ids = IdsField()
    actual_ids = IdsField()
    expected_text = models.TextField(blank=True)
    actual_text = models.TextField(blank=True)
    message_index = models.PositiveIntegerField(null=True)
    evidence = models.TextField()
    remedy = models.TextField(blank=True)
    missing = models.CharField(max_length=200, blank=True)
    places = IdsField(null=True, help_text="Start and stop of every stretch, when there are several.")
    trained_tokens_lost = models.PositiveIntegerField(null=True, default=0, help_text="None = not known.")
    trained_tokens_wrong = models.PositiveIntegerField(null=True, default=0, help_text="None = not known.")
    rows = models.PositiveIntegerField(default=1)
    prompt_tokens_repaid = models.PositiveIntegerField(default=0)
    lost_in_one_row = models.PositiveIntegerField(default=0)
    damage_share = models.FloatField(null=True, help_text="Of the damage to its trajectory; null = not measured.")
    version = models.PositiveIntegerField(help_text="Of the diagnosis that made it.")

    @property
    def cost(self) -> Cost:
        """What it costs, as the diagnosis has it."""
        return Cost(**{part.name: getattr(self, part.name) for part in fields(Cost)})

    class Meta:
        db_table = "rollouts_finding"
        indexes = [
            # The findings of one trajectory, in reading order; whether one of them is of a kind and severity.
            models.Index(
                fields=["trajectory", "step_index", "start"],
                include=("run", "kind", "severity"),
                name="finding_in_trajectory",
            ),
            # Trajectories of a run that have a finding of a kind, at a step; and how many, by kind and by step.
            models.Index(
                fields=["run", "kind", "step_index", "trajectory"], include=("severity",), name="finding_by_kind"
            ),
            # Trajectories with a finding of any kind at a step.
            models.Index(fields=["run", "step_index", "trajectory"], include=("severity",), name="finding_by_step"),
            # Trajectories with a finding of a severity.
            models.Index(fields=["run", "severity", "trajectory"], name="finding_by_severity"),
        ]


class MutedKind(models.Model):
    """A rule: findings of this kind are muted, in one run, in the runs with one chat template, or in the project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=40)
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="+", help_text="null = of any run.")
    chat_template = models.ForeignKey(
        ChatTemplate, null=True, on_delete=models.CASCADE, related_name="+", help_text="null = whatever the template."
    )
    reason = models.CharField(max_length=500)
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(max_length=150, help_text="It stays when the account goes.")
    created_at = models.DateTimeField(auto_now_add=True)
