"""How many tokens an engine could choose from, of each token that it sampled."""

from django.db import migrations, models

from rollouts.store.fields import FloatsField


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0003_damage")]

    operations = [
        migrations.AddField("steptokens", "kept_set", FloatsField(null=True)),
        migrations.AddField("storedstep", "least_kept", models.PositiveIntegerField(
            help_text="The size of the smallest kept set of its tokens; null = none is recorded.", null=True)),
    ]
