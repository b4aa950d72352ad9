"""Which tokens an engine could choose from, of each token that it sampled."""

from django.db import migrations

from rollouts.store.fields import IdsField


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0004_kept_sets")]
    operations = [
        migrations.AddField(
            "steptokens", "kept_ids", IdsField(help_text="The ids of the kept sets, one set after the other.", null=True)),
        migrations.RemoveIndex("storedtrajectory", "trajectory_without_lines"),
    ]
