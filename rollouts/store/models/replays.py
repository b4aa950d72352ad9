"""Replays: what every strategy would make of a trajectory."""

from django.db import models

from rollouts.store.fields import IdsField, MaskField, OriginsField
from rollouts.store.models.trajectories import StoredTrajectory


class Replay(models.Model):
    """What every strategy would make of a trajectory. It is made again only when ``key`` has changed."""

    trajectory = models.OneToOneField(StoredTrajectory, on_delete=models.CASCADE, related_name="replay")
    key = models.CharField(max_length=64, help_text="Hash of all that it follows from; another one makes it stale.")
    report = models.JSONField(null=True, help_text="The figures of each strategy.")


class ReplayRows(models.Model):
    """The rows that one strategy made, concatenated."""

    replay = models.ForeignKey(Replay, on_delete=models.CASCADE, db_index=False, related_name="rows")
    strategy = models.CharField(max_length=40)
    lengths = models.JSONField(help_text="Tokens of each row.")
    ids = IdsField()
    loss_mask = MaskField()
    origin = OriginsField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replay", "strategy"], name="strategy_in_replay")]


class Retokenized(models.Model):
    """What encoding the text of each completion and each row again would change. The diagnosis makes it."""

    trajectory = models.OneToOneField(StoredTrajectory, on_delete=models.CASCADE, related_name="retokenized")
    files_sha256 = models.CharField(max_length=64, help_text="Of the tokenizer that encoded.")
    streams = IdsField(help_text="Of each stream: step or -1, row or -1, CRC-32 of its ids, number of its drifts.")
    drifts = IdsField(help_text="Of each drift: start, stop, number of ids in its place, 1 if it is no UTF-8.")
    expected_ids = IdsField(help_text="The ids in place of all drifts.")
