"""The damage of findings to the gradient of a trajectory."""

from django.db import migrations, models
from django.db.models.deletion import CASCADE

from rollouts.store.fields import FloatsField, IdsField


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0002_forks")]

    operations = [
        migrations.CreateModel("TrajectoryDamage", [
            ("trajectory", models.OneToOneField("rollouts.storedtrajectory", CASCADE, primary_key=True, related_name="+", serialize=False)),
            ("model", models.CharField(help_text="Name of the served model.", max_length=200)),
            ("weights", models.CharField(blank=True, help_text="Digest of the weights' files.", max_length=64)),
            ("rule", models.CharField(blank=True, help_text="Of the loss; empty = not measured.", max_length=20)),
            ("layers", models.CharField(blank=True, help_text="That stand for the model; empty = all of it.", max_length=60)),
            ("cosine", models.FloatField(help_text="null = a gradient is zero, or it was not measured.", null=True)),
            ("relative_error", models.FloatField(null=True)),
            ("norm_ratio", models.FloatField(null=True)),
            ("missing", models.TextField(blank=True, help_text="Why it was not measured, as a sentence.")),
            ("rows", IdsField(help_text="Of each row: number of its ids, CRC-32 of its ids.")),
            ("norms", FloatsField(help_text="Of all rows, one after the other: the norm of each token's contribution.")),
            ("made_at", models.DateTimeField(auto_now=True)),
        ]),
        migrations.AddField("storedfinding", "damage_share", models.FloatField(
            help_text="Of the damage to its trajectory; null = not measured.", null=True)),
        migrations.AddField("storedtrajectory", "damage", models.FloatField(
            help_text="Relative error of the gradient of its rows (``TrajectoryDamage``); null = not measured.", null=True)),
    ]
