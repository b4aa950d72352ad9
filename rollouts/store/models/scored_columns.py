"""What an engine made of a run's rows after the run: columns of log-probabilities, and the damage of findings."""

from django.conf import settings
from django.db import models

from rollouts.store.fields import FloatsField, IdsField
from rollouts.store.models.codes import new_code
from rollouts.store.models.runs import Run
from rollouts.store.models.trajectories import StoredTrajectory

DECODED = " decode"
"""What the engine of a column ends with whose values were decoded token by token; the others were read at once."""
KEPT_SETS = " kept sets"
"""What the engine of a column ends with whose values are the logarithms of the mass of the kept sets."""


class ScoredColumn(models.Model):
    """What one engine with one model returns for the tokens of a run. The same engine and model find it again."""

    code = models.CharField(max_length=16, unique=True, default=new_code)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="scored_columns")
    model = models.CharField(max_length=200, help_text="Name of the served model.")
    engine = models.CharField(max_length=60)
    engine_version = models.CharField(max_length=60, blank=True)
    weights = models.CharField(max_length=64, blank=True, help_text="Digest of the weights' files; empty = a server's.")
    temperature = models.FloatField(default=1.0)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    finished_at = models.DateTimeField(
        null=True, help_text="null = not every trajectory was scored, so nobody reads it."
    )
    n_trajectories = models.PositiveIntegerField(default=0)
    n_tokens = models.PositiveBigIntegerField(default=0, help_text="Tokens that have a score.")
    gap = models.JSONField(null=True, help_text="Scores minus the sampler's: ``GapFigures``; null = it has none.")

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "model", "engine", "engine_version", "weights", "temperature"],
                name="one_column_of_an_engine",
            )
        ]

    @property
    def is_decoded(self) -> bool:
        """Its values were decoded token by token."""
        return str(self.engine).endswith(DECODED)

    @property
    def is_of_kept_sets(self) -> bool:
        """Its values are no log-probabilities of tokens, but the logarithms of the mass of their kept sets."""
        return str(self.engine).endswith(KEPT_SETS)

    def __str__(self) -> str:
        at = "" if self.temperature == 1 else f" at temperature {self.temperature:g}"
        return f"{self.model} on {self.engine} {self.engine_version}".strip() + at


class RowScores(models.Model):
    """The scores of the rows of one trajectory in one column."""

    column = models.ForeignKey(ScoredColumn, on_delete=models.CASCADE, db_index=False, related_name="scores")
    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, related_name="scores")
    rows = IdsField(help_text="Of each row: number of its ids, CRC-32 of its ids.")
    values = FloatsField(help_text="Log-probabilities of all rows, one row after the other; NaN = no score.")
    gap = models.JSONField(null=True, help_text="``GapFigures`` of the trajectory; null = no token can be compared.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["column", "trajectory"], name="scores_once_in_column")]


class TrajectoryDamage(models.Model):
    """The gradient of a trajectory's rows as they are, against that of what was sampled, by one model."""

    trajectory = models.OneToOneField(StoredTrajectory, on_delete=models.CASCADE, primary_key=True, related_name="+")
    model = models.CharField(max_length=200, help_text="Name of the served model.")
    weights = models.CharField(max_length=64, blank=True, help_text="Digest of the weights' files.")
    rule = models.CharField(max_length=20, blank=True, help_text="Of the loss; empty = not measured.")
    layers = models.CharField(max_length=60, blank=True, help_text="That stand for the model; empty = all of it.")
    cosine = models.FloatField(null=True, help_text="null = a gradient is zero, or it was not measured.")
    relative_error = models.FloatField(null=True)
    norm_ratio = models.FloatField(null=True)
    missing = models.TextField(blank=True, help_text="Why it was not measured, as a sentence.")
    rows = IdsField(help_text="Of each row: number of its ids, CRC-32 of its ids.")
    norms = FloatsField(help_text="Of all rows, one after the other: the norm of each token's contribution.")
    made_at = models.DateTimeField(auto_now=True)
