import django.db.models.deletion
from django.db import migrations, models


def the_default_project_knows_them(apps, schema_editor):  # type: ignore[no-untyped-def]
    """All that was registered belongs to the one project there was; its checks call their templates as before."""
    project = apps.get_model("rollouts", "Project").objects.get(code="default")
    known = apps.get_model("rollouts", "ProjectTemplate").objects
    found = apps.get_model("rollouts", "ChatTemplate").objects.order_by("created_at", "sha256")
    for sha256, label, created_at in found.values_list("sha256", "label", "created_at"):
        made = known.create(project=project, chat_template_id=sha256, label=label)
        known.filter(pk=made.pk).update(created_at=created_at)
        apps.get_model("rollouts", "TemplateCheck").objects.filter(chat_template=sha256).update(label=label)


class Migration(migrations.Migration):
    """Each project knows chat templates by names of its own; the text is still stored once."""

    dependencies = [("rollouts", "0019_token_segments")]

    operations = [
        migrations.CreateModel(
            name="ProjectTemplate",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("label", models.CharField(blank=True, max_length=200)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "chat_template",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="names",
                        to="rollouts.chattemplate",
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="+", to="rollouts.project"
                    ),
                ),
            ],
        ),
        migrations.AddConstraint(
            model_name="projecttemplate",
            constraint=models.UniqueConstraint(fields=("project", "chat_template"), name="template_in_project"),
        ),
        migrations.AddField(
            model_name="templatecheck",
            name="label",
            field=models.CharField(blank=True, help_text="The project's name for the template.", max_length=200),
        ),
        migrations.RunPython(the_default_project_knows_them, migrations.RunPython.noop),
        migrations.RemoveField(model_name="chattemplate", name="label"),
    ]
