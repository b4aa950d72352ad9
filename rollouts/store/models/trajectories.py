"""Trajectories, and the indexes of their lists."""

from django.db import models
from django.db.models import Q

from rollouts.store.models.codes import new_code
from rollouts.store.models.runs import Run
from rollouts.store.models.token_segments import Content
from rollouts.store.models.work_status import WorkStatus

FILTERED = (
    "id", "external_id", "status", "stop_reason", "reward", "n_tokens", "n_steps", "n_findings", "worst_severity",
)
"""The columns of the filters of a run's list, and the key."""


class StoredTrajectory(models.Model):
    """One episode."""

    Status = WorkStatus

    code = models.CharField(max_length=16, unique=True, default=new_code)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="trajectories")
    external_id = models.CharField(max_length=200)
    index = models.PositiveIntegerField(help_text="Position in its run.")
    group = models.CharField(max_length=200, blank=True, help_text="Trajectories of one prompt share it.")
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.DONE)
    error = models.TextField(blank=True)
    stop_reason = models.CharField(max_length=60, blank=True)
    reward = models.FloatField(null=True)
    reward_parts = models.JSONField(default=dict)
    task = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+", help_text="Of a launch.")
    seed = models.BigIntegerField(null=True)
    training_step = models.PositiveIntegerField(null=True, help_text="Of the trainer; null = not recorded.")
    tokenizer_name = models.CharField(max_length=200, blank=True, help_text="As the source gives it.")
    extra = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    # A worker's lease on a trajectory of a launch. It is taken by compare-and-set on (attempt, lease_until).
    attempt = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)

    n_steps = models.PositiveIntegerField(default=0)
    n_rows = models.PositiveIntegerField(default=0)
    n_tokens = models.PositiveIntegerField(default=0, help_text="New tokens: deltas and completions.")
    n_sampled = models.PositiveIntegerField(default=0)
    n_trained = models.PositiveIntegerField(default=0)
    n_lost = models.PositiveIntegerField(
        null=True, help_text="Sampled tokens that no row trains as they were sampled. None = not known."
    )
    prompt_line = models.CharField(
        max_length=160, null=True, help_text="First line of the task; null = an older version stored it."
    )
    answer_line = models.CharField(max_length=160, null=True, help_text="First line of the last answer.")
    n_findings = models.PositiveIntegerField(default=0)
    worst_severity = models.CharField(max_length=10, blank=True)
    checks = models.JSONField(
        null=True, help_text="Check -> passed, noted, failed, or the fields that it lacks. None = not known."
    )
    gap = models.JSONField(
        null=True, help_text="``GapFigures`` of its rows; None = no row has the log-probabilities of both sides."
    )
    damage = models.FloatField(
        null=True, help_text="Relative error of the gradient of its rows (``TrajectoryDamage``); null = not measured."
    )

    class Meta:
        db_table = "rollouts_trajectory"
        constraints = [
            models.UniqueConstraint(fields=["run", "index"], name="trajectory_index_in_run"),
            models.UniqueConstraint(fields=["run", "external_id"], name="trajectory_external_id_in_run"),
        ]
        # Each index of an order holds the columns of the filters too: a filter that few trajectories pass then reads
        # the index alone. SQLite has no such columns.
        indexes = [
            # The list of a run in its own order.
            models.Index(fields=["run", "index"], include=FILTERED, name="trajectory_in_order"),
            # The list of a run sorted by reward, by length, by number of findings, by number of rows. Equal ones are
            # sorted by index, so no database index can be read backwards for the other order.
            models.Index(fields=["run", "reward", "index"], include=FILTERED, name="trajectory_by_reward"),
            models.Index(fields=["run", "-reward", "index"], include=FILTERED, name="trajectory_by_best"),
            models.Index(fields=["run", "n_tokens", "index"], include=FILTERED, name="trajectory_by_tokens"),
            models.Index(fields=["run", "-n_tokens", "index"], include=FILTERED, name="trajectory_by_longest"),
            models.Index(fields=["run", "-n_findings", "index"], include=FILTERED, name="trajectory_by_findings"),
            models.Index(fields=["run", "-n_rows", "index"], include=FILTERED, name="trajectory_by_rows"),
            # Siblings: trajectories of one prompt.
            models.Index(fields=["run", "group", "index"], name="trajectory_by_group"),
            # The trajectories of one training step, and of several.
            models.Index(
                fields=["run", "training_step", "index"],
                condition=Q(training_step__isnull=False),
                name="trajectory_by_training_step",
            ),
            # What a worker may take next.
            models.Index(fields=["run", "status", "index"], name="trajectory_by_status"),
            # How many trajectories of a run have which worst severity, for the list of runs.
            models.Index(fields=["run", "worst_severity"], condition=~Q(worst_severity=""), name="trajectory_by_worst"),
        ]
