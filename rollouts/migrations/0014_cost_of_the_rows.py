from django.db import migrations, models
from django.db.models import F

from rollouts.store.fields import IdsField

UNKNOWN = "None = not known."


def split_cost(apps, schema_editor):
    """Earlier versions counted what a break would cost in one row. What the stored rows lose is then not known."""
    found = apps.get_model("rollouts", "StoredFinding").objects.filter(axis="stream", trained_tokens_lost__gt=0)
    found.update(lost_in_one_row=F("trained_tokens_lost"), trained_tokens_lost=None)


class Migration(migrations.Migration):
    dependencies = [("rollouts", "0013_state_of_jobs_alone")]

    operations = [
        migrations.AddField(
            "storedtrajectory",
            "n_lost",
            models.PositiveIntegerField(
                null=True, help_text="Sampled tokens that no row trains as they were sampled. None = not known."
            ),
        ),
        migrations.AddField("storedfinding", "lost_in_one_row", models.PositiveIntegerField(default=0)),
        migrations.AddField(
            "storedfinding",
            "places",
            IdsField(null=True, help_text="Start and stop of every stretch, when there are several."),
        ),
        *(
            migrations.AlterField(
                "storedfinding", name, models.PositiveIntegerField(null=True, default=0, help_text=UNKNOWN)
            )
            for name in ("trained_tokens_lost", "trained_tokens_wrong")
        ),
        migrations.RunPython(split_cost, migrations.RunPython.noop),
    ]
