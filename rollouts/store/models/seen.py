"""Which trajectories somebody has looked at."""

from django.conf import settings
from django.db import models

from rollouts.store.models.trajectories import StoredTrajectory


class Seen(models.Model):
    """A user says to have looked at a trajectory. Nobody else sees it."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False)
    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "trajectory"], name="seen_once")]
