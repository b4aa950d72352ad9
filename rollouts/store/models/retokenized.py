"""What encoding the text of a trajectory again would change."""

from django.db import models

from rollouts.store.fields import IdsField
from rollouts.store.models.trajectories import StoredTrajectory


class Retokenized(models.Model):
    """What encoding the text of each completion and each row again would change. The diagnosis makes it."""

    trajectory = models.OneToOneField(StoredTrajectory, on_delete=models.CASCADE, related_name="retokenized")
    files_sha256 = models.CharField(max_length=64, help_text="Of the tokenizer that encoded.")
    streams = IdsField(help_text="Of each stream: step or -1, row or -1, CRC-32 of its ids, number of its drifts.")
    drifts = IdsField(help_text="Of each drift: start, stop, number of ids in its place, 1 if it is no UTF-8.")
    expected_ids = IdsField(help_text="The ids in place of all drifts.")
