"""Figures of a run by the step of the trainer, and by the version of the policy that sampled."""

from django.db import models

from rollouts.store.models.runs import Run


class CountedFigures(models.Model):
    """What is known of some trajectories of a run. ``store.runs.training_steps`` counts it again and again."""

    n_trajectories = models.PositiveIntegerField()
    n_broken = models.PositiveIntegerField(help_text="Trajectories with a finding of severity error.")
    n_steps = models.PositiveBigIntegerField(help_text="Engine calls.")
    n_rows = models.PositiveBigIntegerField()
    n_tokens = models.PositiveBigIntegerField()
    n_sampled = models.PositiveBigIntegerField()
    n_trained = models.PositiveBigIntegerField()
    n_lost = models.PositiveBigIntegerField(null=True, help_text="None = not known of some trajectory.")
    n_repaid = models.PositiveBigIntegerField(help_text="Prompt tokens that were computed again because of breaks.")
    n_truncated = models.PositiveIntegerField(
        null=True,
        help_text="Trajectories with a completion that was cut by its length; None = no finish reason is known.",
    )
    n_rewards = models.PositiveIntegerField()
    reward_sum = models.FloatField()
    n_groups = models.PositiveIntegerField(help_text="Groups with at least two rewards.")
    n_same_reward = models.PositiveIntegerField(help_text="Groups of these whose rewards are all equal.")
    finding_counts = models.JSONField(default=dict, help_text="Kind -> trajectories that have such a finding.")
    gap = models.JSONField(null=True, help_text="Figures of the gap; None = no row has both log-probabilities.")
    first_index = models.PositiveIntegerField(
        null=True, help_text="Position of its first trajectory in the run; None = an older version counted."
    )
    last_index = models.PositiveIntegerField(null=True, help_text="Position of its last trajectory.")

    class Meta:
        abstract = True


class TrainingStepFigures(CountedFigures):
    """The trajectories of one training step."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="training_steps")
    training_step = models.PositiveIntegerField()

    class Meta:
        constraints = [
            # The steps of a run in order, and one of them.
            models.UniqueConstraint(fields=["run", "training_step"], name="figures_of_training_step")
        ]


class PolicyVersionFigures(CountedFigures):
    """The trajectories whose first step one policy version sampled."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="policy_versions")
    version = models.CharField(max_length=100)
    first_training_step = models.PositiveIntegerField(null=True, help_text="null = not recorded.")
    last_training_step = models.PositiveIntegerField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "version"], name="figures_of_policy_version")]


class PushedFigures(models.Model):
    """How far the figures of a run count what was pushed to it."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="pushed_figures")
    counted_to = models.PositiveBigIntegerField(help_text="Key of the last trajectory that is counted.")
    counted_at = models.DateTimeField(null=True)
    due_at = models.DateTimeField(null=True, help_text="When the rest is to be counted; null = there is none.")

    class Meta:
        indexes = [
            # What the clock of the workers counts next.
            models.Index(fields=["due_at"], condition=models.Q(due_at__isnull=False), name="pushed_figures_due")
        ]
