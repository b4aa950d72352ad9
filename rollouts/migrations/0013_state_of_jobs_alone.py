from django.db import migrations, models
from django.db.models import Q


class Migration(migrations.Migration):
    """Where a template check or a replay stands is said by its job."""

    dependencies = [("rollouts", "0012_jobs_of_all_work")]

    operations = [
        *(
            migrations.RemoveField(model_name=model, name=name)
            for model, names in (
                ("replay", ("asked_at", "error", "status")), ("templatecheck", ("error", "progress", "status")),
            )
            for name in names
        ),
        migrations.AddConstraint(
            model_name="job",
            constraint=models.CheckConstraint(
                condition=Q(run__isnull=False, replay=None, template_check=None)
                | Q(run=None, replay__isnull=False, template_check=None)
                | Q(run=None, replay=None, template_check__isnull=False),
                name="job_of_one_subject",
            ),
        ),
    ]
