from django.db import migrations, models


class Migration(migrations.Migration):
    """What each check of the diagnosis came to, for each trajectory."""

    dependencies = [("rollouts", "0014_cost_of_the_rows")]

    operations = [
        migrations.AddField(
            model_name="storedtrajectory",
            name="checks",
            field=models.JSONField(
                null=True, help_text="Check -> passed, noted, failed, or the fields that it lacks. None = not known."
            ),
        ),
    ]
