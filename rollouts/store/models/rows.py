"""Training rows."""

from django.db import models
from django.db.models import Q

from rollouts.store.fields import FloatsField, IdsField, MaskField, OriginsField
from rollouts.store.models.steps import StoredStep
from rollouts.store.models.token_segments import Content, InSegment
from rollouts.store.models.trajectories import StoredTrajectory


class StoredRow(InSegment):
    """One training row. A row that equals the stream of a step has no stored tokens: ``last_step`` names the step."""

    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="rows")
    index = models.PositiveIntegerField()
    last_step = models.ForeignKey(StoredStep, null=True, on_delete=models.CASCADE, related_name="+")
    n_tokens = models.PositiveIntegerField()
    n_trained = models.PositiveIntegerField()
    step_indices = models.JSONField(default=list, help_text="Steps whose completions it trains.")
    extra = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    column_names = models.JSONField(null=True, help_text="The trainer's columns in the file; null = ``RowColumn``.")

    class Meta:
        db_table = "rollouts_row"
        constraints = [models.UniqueConstraint(fields=["trajectory", "index"], name="row_index_in_trajectory")]
        indexes = [
            # Whether anything still names a segment.
            models.Index(fields=["segment"], name="row_in_segment", condition=Q(segment__isnull=False)),
        ]


class RowTokens(models.Model):
    """The arrays of a row that equals no step's stream, each as long as in the source."""

    row = models.OneToOneField(StoredRow, on_delete=models.CASCADE, primary_key=True, related_name="tokens")
    ids = IdsField()
    loss_mask = MaskField()
    logprobs = FloatsField(null=True)
    origin = OriginsField(null=True)


class RowColumn(models.Model):
    """A trainer-side column of a row: advantages, entropy, trainer logprobs, ..."""

    row = models.ForeignKey(StoredRow, on_delete=models.CASCADE, db_index=False, related_name="columns")
    name = models.CharField(max_length=60)
    values = FloatsField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["row", "name"], name="column_name_in_row")]
