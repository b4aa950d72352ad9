from django.db import migrations, models


class Migration(migrations.Migration):
    """A job stores beside its sentence what helps, because pages, API and commands word that each as their own."""

    dependencies = [("rollouts", "0041_pushed_figures")]

    operations = [
        migrations.AddField(
            "job",
            "remedy",
            models.CharField(
                blank=True, help_text="What helps; each page, API or command words it.", max_length=40, default=""
            ),
            preserve_default=False,
        )
    ]
