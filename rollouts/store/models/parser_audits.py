"""Parser audits: what every parser read of one reply."""

from django.db import models

from rollouts.store.models.trajectories import StoredTrajectory


class ParserAudit(models.Model):
    """What every parser read of the reply of a step. It is made again only when ``key`` has changed, or when asked."""

    trajectory = models.ForeignKey(
        StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="parser_audits"
    )
    step_index = models.PositiveIntegerField()
    key = models.CharField(max_length=64, help_text="Hash of all that it follows from; another one makes it stale.")
    report = models.JSONField(null=True, help_text="What each parser read, with its tokens.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["trajectory", "step_index"], name="parser_audit_of_step")]
