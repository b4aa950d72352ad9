"""Forks: runs whose trajectories continue another trajectory from one of its tokens."""

from django.db import models

from rollouts.store.fields import IdsField
from rollouts.store.models.runs import Run
from rollouts.store.models.steps import StoredStep
from rollouts.store.models.trajectories import StoredTrajectory


class Fork(models.Model):
    """Where the trajectories of a run begin. Their first step stores only what it adds to ``shared`` and ``tail``."""

    class Side(models.TextChoices):
        """Of the two runs that continue from both sides of a break."""

        SAMPLED = "sampled"  # From what the policy sampled.
        BROKEN = "broken"  # From what was made of it.

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="fork")
    parent = models.ForeignKey(
        StoredTrajectory, null=True, on_delete=models.SET_NULL, related_name="forks", help_text="Null = it was deleted."
    )
    row = models.PositiveIntegerField(help_text="The row of the parent in which the place is.")
    offset = models.PositiveIntegerField(help_text="The place: the first token that is not the parent's.")
    step_index = models.PositiveIntegerField(null=True, help_text="The parent's step of the place; null = not known.")
    base_step = models.ForeignKey(
        StoredStep, null=True, on_delete=models.SET_NULL, related_name="+",
        help_text="The step whose stream begins with the shared ids; null = the row has its own ids.",
    )
    n_shared = models.PositiveIntegerField(help_text="Ids of the parent that the prefix begins with.")
    tail_ids = IdsField(help_text="Ids of the prefix behind these: another token, or another text.")
    prompt_length = models.PositiveIntegerField(help_text="Ids of the prefix before the turn that is continued.")
    token_id = models.IntegerField(null=True, help_text="The token that stands at the place instead.")
    text = models.TextField(null=True, help_text="What the strategy observes instead; empty = what was recorded.")
    goes_on = models.BooleanField(default=False, help_text="Also where the environment answers otherwise.")
    pair = models.CharField(max_length=16, blank=True, help_text="The two sides of a break share it.")
    side = models.CharField(max_length=10, choices=Side.choices, blank=True)
    finding = models.PositiveIntegerField(null=True, help_text="Number of the finding whose sides these are.")

    class Meta:
        # The two runs of a break.
        indexes = [models.Index(fields=["pair"], name="fork_pair", condition=~models.Q(pair=""))]
