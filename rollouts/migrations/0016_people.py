import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import rollouts.store.models.codes
import rollouts.store.models.people


def everything_is_in_the_default_project(apps, schema_editor):  # type: ignore[no-untyped-def]
    """Everyone could do everything, so all users become admins of the one project. The owner gets the server."""
    users = apps.get_model(*settings.AUTH_USER_MODEL.split(".")).objects.order_by("pk")
    memberships = apps.get_model("rollouts", "Membership").objects
    project = apps.get_model("rollouts", "Project").objects.get(code="default")
    memberships.bulk_create(memberships.model(project=project, user=user, role="admin") for user in users)
    users.filter(username="local").update(is_superuser=True, is_staff=True)
    apps.get_model("rollouts", "ApiToken").objects.update(scopes=["push"])


def make_default_project(apps, schema_editor):  # type: ignore[no-untyped-def]
    apps.get_model("rollouts", "Project").objects.create(pk=1, code="default", name="Default")
    if schema_editor.connection.vendor == "postgresql":
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT setval(pg_get_serial_sequence('rollouts_project', 'id'), 1)")


def add_project(model, **more):  # type: ignore[no-untyped-def]
    """A column: 1 in every row that there is. The model's own default asks for columns of later days."""
    before, after = (
        migrations.AddField(model, "project", models.ForeignKey(default=default, **more))
        for default in (1, rollouts.store.models.people.default_project)
    )
    return migrations.SeparateDatabaseAndState([before], [after])


class Migration(migrations.Migration):
    """Projects, members, invitations, scopes of API tokens, the audit log. What there was goes to one project."""

    dependencies = [("rollouts", "0015_checks"), migrations.swappable_dependency(settings.AUTH_USER_MODEL)]

    operations = [
        migrations.CreateModel(
            name="Project",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("code", models.CharField(default=rollouts.store.models.codes.new_code, max_length=16, unique=True)),
                ("name", models.CharField(max_length=100, unique=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
        migrations.AddField(
            model_name="apitoken",
            name="expires_at",
            field=models.DateTimeField(help_text="null = never.", null=True),
        ),
        migrations.AddField(
            model_name="apitoken",
            name="scopes",
            field=models.JSONField(default=list, help_text="Values of ``Scope``."),
        ),
        migrations.AddField(
            model_name="sharelink",
            name="n_opened",
            field=models.PositiveIntegerField(default=0, help_text="How often it was opened."),
        ),
        migrations.AddField(
            model_name="sharelink",
            name="opened_at",
            field=models.DateTimeField(help_text="When it was opened last.", null=True),
        ),
        migrations.AddField(
            model_name="sharelink",
            name="row_index",
            field=models.PositiveIntegerField(help_text="The one row that it shows; null = everything.", null=True),
        ),
        migrations.AddField(
            model_name="sharelink",
            name="start",
            field=models.PositiveIntegerField(help_text="The first token of that row that it shows.", null=True),
        ),
        migrations.AddField(
            model_name="sharelink",
            name="stop",
            field=models.PositiveIntegerField(help_text="The first token behind those that it shows.", null=True),
        ),
        migrations.AlterField(
            model_name="tokenizer",
            name="name",
            field=models.CharField(help_text="Unique in its project.", max_length=200),
        ),
        migrations.CreateModel(
            name="Membership",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "role",
                    models.CharField(
                        choices=[("viewer", "Viewer"), ("member", "Member"), ("admin", "Admin")], max_length=10
                    ),
                ),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "user",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="memberships",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="memberships", to="rollouts.project"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Invitation",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                (
                    "token_sha256",
                    models.CharField(
                        help_text="The token itself is shown once and not kept.", max_length=64, unique=True
                    ),
                ),
                (
                    "hint",
                    models.CharField(help_text="First characters of the token, to tell links apart.", max_length=8),
                ),
                (
                    "role",
                    models.CharField(
                        choices=[("viewer", "Viewer"), ("member", "Member"), ("admin", "Admin")], max_length=10
                    ),
                ),
                ("note", models.CharField(blank=True, help_text="For whom it is.", max_length=200)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("expires_at", models.DateTimeField()),
                ("used_at", models.DateTimeField(null=True)),
                ("revoked_at", models.DateTimeField(null=True)),
                (
                    "created_by",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="+", to=settings.AUTH_USER_MODEL
                    ),
                ),
                (
                    "used_by",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="invitations", to="rollouts.project"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="AuditEvent",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(auto_now_add=True)),
                (
                    "user_name",
                    models.CharField(blank=True, help_text="It stays when the account goes.", max_length=150),
                ),
                ("address", models.CharField(blank=True, help_text="The address of the client.", max_length=45)),
                ("action", models.CharField(help_text="``rollouts.store.audit.Action``.", max_length=40)),
                (
                    "target",
                    models.CharField(
                        blank=True, help_text="Kind of the object: run, trajectory, check, ...", max_length=40
                    ),
                ),
                ("code", models.CharField(blank=True, help_text="Code of the object, or its key.", max_length=16)),
                (
                    "detail",
                    models.CharField(
                        blank=True, help_text="Its name, or what changed. Never a secret.", max_length=500
                    ),
                ),
                (
                    "user",
                    models.ForeignKey(
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.SET_NULL, related_name="+", to="rollouts.project"
                    ),
                ),
            ],
        ),
        migrations.RunPython(make_default_project, migrations.RunPython.noop),
        add_project("apitoken", on_delete=django.db.models.deletion.CASCADE, to="rollouts.project"),
        add_project("run", on_delete=django.db.models.deletion.PROTECT, related_name="runs", to="rollouts.project"),
        add_project(
            "sharelink",
            help_text="Of what it opens.",
            on_delete=django.db.models.deletion.CASCADE,
            to="rollouts.project",
        ),
        add_project(
            "templatecheck", on_delete=django.db.models.deletion.PROTECT, related_name="checks", to="rollouts.project"
        ),
        add_project(
            "tokenizer", on_delete=django.db.models.deletion.PROTECT, related_name="tokenizers", to="rollouts.project"
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(fields=["project", "-created_at", "-id"], name="run_newest_of_project"),
        ),
        migrations.AddConstraint(
            model_name="tokenizer",
            constraint=models.UniqueConstraint(fields=("project", "name"), name="tokenizer_name_in_project"),
        ),
        migrations.AddConstraint(
            model_name="membership",
            constraint=models.UniqueConstraint(fields=("project", "user"), name="one_role_in_project"),
        ),
        migrations.AddIndex(
            model_name="auditevent",
            index=models.Index(fields=["project", "-at", "-id"], name="audit_of_project"),
        ),
        migrations.AddIndex(
            model_name="auditevent",
            index=models.Index(fields=["-at", "-id"], name="audit_newest"),
        ),
        migrations.RunPython(everything_is_in_the_default_project, migrations.RunPython.noop),
    ]
