import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    """A job may belong to a replay or to a template check."""

    dependencies = [
        ("rollouts", "0010_stored_names"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddField(
            model_name="job",
            name="progress",
            field=models.CharField(blank=True, help_text="Of a search for a repair: how far it is.", max_length=200),
        ),
        migrations.AddField(
            model_name="job",
            name="replay",
            field=models.OneToOneField(
                null=True, on_delete=django.db.models.deletion.CASCADE, to="rollouts.replay"
            ),
        ),
        migrations.AddField(
            model_name="job",
            name="template_check",
            field=models.OneToOneField(
                null=True, on_delete=django.db.models.deletion.CASCADE, to="rollouts.templatecheck"
            ),
        ),
        migrations.AlterField(
            model_name="job",
            name="kind",
            field=models.CharField(
                choices=[
                    ("diagnose", "Diagnose"),
                    ("export", "Export"),
                    ("replay", "Replay"),
                    ("import", "Import"),
                    ("diagnose_pushed", "Diagnose Pushed"),
                    ("replay_trajectory", "Replay Trajectory"),
                    ("check_template", "Check Template"),
                    ("repair_template", "Repair Template"),
                ],
                max_length=20,
            ),
        ),
        migrations.AlterField(
            model_name="job",
            name="run",
            field=models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="jobs", to="rollouts.run"
            ),
        ),
    ]
