"""All tables. It took the place of the migrations 0001 to 0041 that there were before the first release.

A database of that time is refused (``refusal_of_old_database``); a backup of it is restored into a new one.
"""

from contextlib import suppress

from django.conf import settings
from django.db import DatabaseError, migrations, models, transaction
from django.db.models.deletion import CASCADE, DO_NOTHING, PROTECT, SET_NULL
from django.utils.timezone import now

from rollouts.store.fields import FloatsField, IdsField, MaskField, OriginsField
from rollouts.store.models.codes import new_code
from rollouts.store.models.people import default_project

# The columns by which the list of a run is filtered. Each index of an order holds them too: a filter that few
# trajectories pass then reads the index alone. SQLite has no such columns.
FILTERED = ("id", "external_id", "status", "stop_reason", "reward", "n_tokens", "n_steps", "n_findings", "worst_severity")


def make_default_project(apps, schema_editor):
    """The project of whoever names none."""
    apps.get_model("rollouts", "Project").objects.create(pk=1, code="default", name="Default")
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("SELECT setval(pg_get_serial_sequence('rollouts_project', 'id'), 1)")


def vacuum_often(apps, schema_editor):
    """A list reads an index alone only where PostgreSQL has vacuumed the table.

    By default it does so after a fifth of the table is new: in a table of a million, a run of 200,000 would never count.
    """
    if schema_editor.connection.vendor == "postgresql":
        for table in ("rollouts_trajectory", "rollouts_finding"):
            schema_editor.execute(
                f"ALTER TABLE {table} SET (autovacuum_vacuum_insert_scale_factor = 0.01, "
                "autovacuum_vacuum_scale_factor = 0.01, autovacuum_analyze_scale_factor = 0.01)"
            )


def count_pairs(apps, schema_editor):
    """A kind has mostly one severity. Without this PostgreSQL takes the two for independent, and looks for findings
    that are rare as if they were frequent.
    """
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("CREATE STATISTICS finding_kind_severity (mcv) ON kind, severity FROM rollouts_finding")


def index_ids(apps, schema_editor):
    """Parts of an external id are found by pg_trgm, where the server has it and lets us use it. Otherwise they are
    found by reading every id of the run.
    """
    connection = schema_editor.connection
    if connection.vendor == "postgresql":
        with suppress(DatabaseError), transaction.atomic(connection.alias), connection.cursor() as cursor:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
            cursor.execute(
                "CREATE INDEX trajectory_by_part_of_id ON rollouts_trajectory USING gin (upper(external_id::text) "
                "gin_trgm_ops)"
            )


def counted() -> list[tuple[str, models.Field]]:
    """What is counted of a training step and of a policy version."""
    return [
        ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
        ("n_trajectories", models.PositiveIntegerField()),
        ("n_broken", models.PositiveIntegerField(help_text="Trajectories with a finding of severity error.")),
        ("n_steps", models.PositiveBigIntegerField(help_text="Engine calls.")),
        ("n_rows", models.PositiveBigIntegerField()),
        ("n_tokens", models.PositiveBigIntegerField()),
        ("n_sampled", models.PositiveBigIntegerField()),
        ("n_trained", models.PositiveBigIntegerField()),
        ("n_lost", models.PositiveBigIntegerField(help_text="None = not known of some trajectory.", null=True)),
        ("n_repaid", models.PositiveBigIntegerField(help_text="Prompt tokens that were computed again because of breaks.")),
        ("n_truncated", models.PositiveIntegerField(help_text="Trajectories with a completion that was cut by its length; None = no finish reason is known.", null=True)),
        ("n_rewards", models.PositiveIntegerField()),
        ("reward_sum", models.FloatField()),
        ("n_groups", models.PositiveIntegerField(help_text="Groups with at least two rewards.")),
        ("n_same_reward", models.PositiveIntegerField(help_text="Groups of these whose rewards are all equal.")),
        ("finding_counts", models.JSONField(default=dict, help_text="Kind -> trajectories that have such a finding.")),
        ("gap", models.JSONField(help_text="Figures of the gap; None = no row has both log-probabilities.", null=True)),
        ("first_index", models.PositiveIntegerField(help_text="Position of its first trajectory in the run; None = an older version counted.", null=True)),
        ("last_index", models.PositiveIntegerField(help_text="Position of its last trajectory.", null=True)),
    ]


class Migration(migrations.Migration):
    initial = True

    dependencies = [migrations.swappable_dependency(settings.AUTH_USER_MODEL), ("sessions", "0001_initial")]

    operations = [
        migrations.CreateModel("Project", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("name", models.CharField(max_length=100, unique=True)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ]),
        migrations.CreateModel("Membership", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(on_delete=CASCADE, related_name="memberships", to="rollouts.project")),
            ("user", models.ForeignKey(on_delete=CASCADE, related_name="memberships", to=settings.AUTH_USER_MODEL)),
            ("role", models.CharField(choices=[("viewer", "Viewer"), ("member", "Member"), ("admin", "Admin")], max_length=10)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("project", "user"), name="one_role_in_project")]}),
        migrations.CreateModel("Invitation", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("token_sha256", models.CharField(help_text="The token itself is shown once and not kept.", max_length=64, unique=True)),
            ("hint", models.CharField(help_text="First characters of the token, to tell links apart.", max_length=8)),
            ("project", models.ForeignKey(on_delete=CASCADE, related_name="invitations", to="rollouts.project")),
            ("role", models.CharField(choices=[("viewer", "Viewer"), ("member", "Member"), ("admin", "Admin")], max_length=10)),
            ("note", models.CharField(blank=True, help_text="For whom it is.", max_length=200)),
            ("created_by", models.ForeignKey(on_delete=CASCADE, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("expires_at", models.DateTimeField()),
            ("used_by", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("used_at", models.DateTimeField(null=True)),
            ("revoked_at", models.DateTimeField(null=True)),
        ]),
        migrations.CreateModel("ApiToken", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("token_sha256", models.CharField(help_text="The token itself is shown once and not kept.", max_length=64, unique=True)),
            ("hint", models.CharField(help_text="First characters of the token, to tell tokens apart.", max_length=12)),
            ("name", models.CharField(help_text="What uses it.", max_length=200)),
            ("project", models.ForeignKey(default=default_project, on_delete=CASCADE, to="rollouts.project")),
            ("scopes", models.JSONField(default=list, help_text="Values of ``Scope``.")),
            ("created_by", models.ForeignKey(on_delete=CASCADE, to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("last_used_at", models.DateTimeField(help_text="To the minute.", null=True)),
            ("expires_at", models.DateTimeField(help_text="null = never.", null=True)),
            ("revoked_at", models.DateTimeField(null=True)),
        ]),
        migrations.CreateModel("AuditEvent", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("at", models.DateTimeField(auto_now_add=True)),
            ("user", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("user_name", models.CharField(blank=True, help_text="It stays when the account goes.", max_length=150)),
            ("address", models.CharField(blank=True, help_text="The address of the client.", max_length=45)),
            ("project", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to="rollouts.project")),
            ("action", models.CharField(help_text="``rollouts.store.people.activity_log.Action``.", max_length=40)),
            ("target", models.CharField(blank=True, help_text="Kind of the object: run, trajectory, check, ...", max_length=40)),
            ("code", models.CharField(blank=True, help_text="Code of the object, or its key.", max_length=16)),
            ("detail", models.CharField(blank=True, help_text="Its name, or what changed. Never a secret.", max_length=500)),
        ], options={
            # The log of a project, and of the server, newest first.
            "indexes": [models.Index(fields=["project", "-at", "-id"], name="audit_of_project"), models.Index(fields=["-at", "-id"], name="audit_newest")]
        }),
        migrations.CreateModel("LoginSession", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("session", models.OneToOneField(on_delete=CASCADE, related_name="+", to="sessions.session")),
            ("user", models.ForeignKey(on_delete=CASCADE, related_name="login_sessions", to=settings.AUTH_USER_MODEL)),
            ("device", models.CharField(blank=True, help_text="What the browser says of itself.", max_length=200)),
            ("address", models.CharField(blank=True, help_text="The address it was used from last.", max_length=45)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("last_used_at", models.DateTimeField(help_text="To ten minutes.")),
        ]),
        migrations.CreateModel("ExternalIdentity", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("user", models.ForeignKey(on_delete=CASCADE, related_name="external_identities", to=settings.AUTH_USER_MODEL)),
            ("issuer", models.CharField(max_length=255)),
            ("subject", models.CharField(max_length=255)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("issuer", "subject"), name="one_account_of_subject")]}),
        migrations.CreateModel(
            name="Content", fields=[("sha256", models.CharField(max_length=64, primary_key=True, serialize=False)), ("body", models.TextField())]
        ),
        migrations.CreateModel("ChatTemplate", [
            ("sha256", models.CharField(max_length=64, primary_key=True, serialize=False)),
            ("text", models.TextField()),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ]),
        migrations.CreateModel("ProjectTemplate", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(on_delete=CASCADE, related_name="+", to="rollouts.project")),
            ("chat_template", models.ForeignKey(on_delete=CASCADE, related_name="names", to="rollouts.chattemplate")),
            ("label", models.CharField(blank=True, max_length=200)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("project", "chat_template"), name="template_in_project")]}),
        migrations.CreateModel("Tokenizer", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(default=default_project, on_delete=PROTECT, related_name="tokenizers", to="rollouts.project")),
            ("name", models.CharField(help_text="Unique in its project.", max_length=200)),
            ("sha256", models.CharField(db_index=True, help_text="Of tokenizer.json.", max_length=64)),
            ("files_sha256", models.CharField(help_text="Names its files in the storage; empty = they are lost.", max_length=64)),
            ("source", models.CharField(help_text="Where it came from: name of a folder, upload, or hub id.", max_length=500)),
            ("revision", models.CharField(blank=True, help_text="Of a hub id.", max_length=100)),
            ("vocab_size", models.PositiveIntegerField()),
            ("encoder", models.CharField(help_text="fastokens or tokenizers: which encoder was found exact.", max_length=20)),
            ("chat_template", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to="rollouts.chattemplate")),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("project", "name"), name="tokenizer_name_in_project")]}),
        migrations.CreateModel("Run", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(default=default_project, on_delete=PROTECT, related_name="runs", to="rollouts.project")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("name", models.CharField(max_length=200)),
            ("kind", models.CharField(choices=[("launch", "Launch"), ("import", "Import")], max_length=10)),
            ("status", models.CharField(choices=[("queued", "Queued"), ("running", "Running"), ("done", "Done"), ("failed", "Failed"),
                ("cancelled", "Cancelled")], default="queued", max_length=10)),
            ("error", models.TextField(blank=True)),
            ("created_by", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("started_at", models.DateTimeField(blank=True, null=True)),
            ("finished_at", models.DateTimeField(blank=True, null=True)),
            ("heartbeat_at", models.DateTimeField(blank=True, help_text="Last sign of life of the work.", null=True)),
            ("cancel_requested", models.BooleanField(default=False)),
            ("model", models.CharField(blank=True, max_length=200)),
            ("token_store", models.CharField(default="database",
                help_text="Where its token arrays go: a name of ``rollouts.store.token_arrays``.", max_length=20)),
            ("engine", models.CharField(blank=True, max_length=60)),
            ("environment", models.CharField(blank=True, max_length=60)),
            ("strategy", models.CharField(blank=True, max_length=40)),
            ("tokenizer", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to="rollouts.tokenizer")),
            ("chat_template", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to="rollouts.chattemplate")),
            ("rows_chat_template", models.ForeignKey(blank=True,
                help_text="Of a launch whose rows are made with another template than its prompts; empty = the same.", null=True,
                on_delete=SET_NULL, related_name="+", to="rollouts.chattemplate")),
            ("format", models.CharField(blank=True, help_text="Of an import: the formats that were recognised.", max_length=200)),
            ("settings", models.JSONField(default=dict, help_text="What the form asked for: prompts, group, sampling, seed, limits.")),
            ("n_expected", models.PositiveIntegerField(default=0, help_text="Trajectories a launch will make.")),
            ("n_trajectories", models.PositiveIntegerField(default=0)),
            ("n_finished", models.PositiveIntegerField(default=0)),
            ("n_failed", models.PositiveIntegerField(default=0)),
            ("n_steps", models.PositiveIntegerField(default=0)),
            ("n_rows", models.PositiveIntegerField(default=0)),
            ("n_tokens", models.PositiveBigIntegerField(default=0, help_text="New tokens stored: deltas and completions.")),
            ("n_sampled", models.PositiveBigIntegerField(default=0)),
            ("n_rejected", models.PositiveIntegerField(default=0)),
            ("n_rewards", models.PositiveIntegerField(default=0, help_text="Trajectories that have a reward.")),
            ("reward_sum", models.FloatField(default=0.0)),
            ("finding_counts", models.JSONField(default=dict, help_text="kind -> number of findings.")),
            ("diagnosis_version",
                models.PositiveIntegerField(help_text="The oldest version that diagnosed a trajectory of the run; null = none has.",
                null=True)),
            ("bytes_done", models.PositiveBigIntegerField(default=0, help_text="Of an import: how far the reader is.")),
            ("bytes_total", models.PositiveBigIntegerField(default=0)),
        ], options={
            "indexes": [
                # The list of runs, newest first: of all projects, and of one.
                models.Index(fields=["-created_at", "-id"], name="run_newest"),
                models.Index(fields=["project", "-created_at", "-id"], name="run_newest_of_project"),
                # Runs that are not finished, for workers that look for work and for the page of workers.
                models.Index(condition=models.Q(("status__in", ("queued", "running"))), fields=["created_at", "id"], name="run_active"),
            ]
        }),
        migrations.CreateModel("RunTag", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("run", models.ForeignKey(on_delete=CASCADE, related_name="tags", to="rollouts.run")),
            ("name", models.CharField(max_length=40)),
        ], options={
            "constraints": [models.UniqueConstraint(fields=("run", "name"), name="tag_once_on_run")],
            # The runs with a tag, and the tags that there are.
            "indexes": [models.Index(fields=["name", "run"], name="tag_by_name")],
        }),
        migrations.CreateModel("RunFigures", [
            ("run", models.OneToOneField(on_delete=CASCADE, primary_key=True, related_name="figures", serialize=False, to="rollouts.run")),
            ("state", models.CharField(help_text="Hash of the totals it was counted at; others make it stale.", max_length=64)),
            ("body", models.JSONField(help_text="``rollouts.store.runs.figures.count``.")),
        ]),
        migrations.CreateModel("TrainingStepFigures", [
            *counted(),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="training_steps", to="rollouts.run")),
            ("training_step", models.PositiveIntegerField()),
        ], # The steps of a run in order, and one of them.
        options={"constraints": [models.UniqueConstraint(fields=("run", "training_step"), name="figures_of_training_step")]}),
        migrations.CreateModel("PolicyVersionFigures", [
            *counted(),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="policy_versions", to="rollouts.run")),
            ("version", models.CharField(max_length=100)),
            ("first_training_step", models.PositiveIntegerField(help_text="null = not recorded.", null=True)),
            ("last_training_step", models.PositiveIntegerField(null=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("run", "version"), name="figures_of_policy_version")]}),
        migrations.CreateModel("PushedFigures", [
            ("run", models.OneToOneField(on_delete=CASCADE, primary_key=True, related_name="pushed_figures", serialize=False, to="rollouts.run")),
            ("counted_to", models.PositiveBigIntegerField(help_text="Key of the last trajectory that is counted.")),
            ("counted_at", models.DateTimeField(null=True)),
            ("due_at", models.DateTimeField(help_text="When the rest is to be counted; null = there is none.", null=True)),
        ], # What the clock of the workers counts next.
        options={"indexes": [models.Index(condition=models.Q(("due_at__isnull", False)), fields=["due_at"], name="pushed_figures_due")]}),
        migrations.CreateModel("Rejection", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("run", models.ForeignKey(on_delete=CASCADE, related_name="rejections", to="rollouts.run")),
            ("file", models.CharField(max_length=500)),
            ("line", models.PositiveIntegerField(null=True)),
            ("reason", models.TextField()),
        ]),
        migrations.CreateModel("TokenSegment", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("run", models.ForeignKey(on_delete=CASCADE, related_name="token_segments", to="rollouts.run")),
            ("key", models.CharField(help_text="Of the file in the storage.", max_length=200, unique=True)),
            ("n_items", models.PositiveIntegerField(help_text="Steps and rows in the file.")),
            ("n_tokens", models.PositiveBigIntegerField(help_text="Ids in the file.")),
            ("n_bytes", models.PositiveBigIntegerField(help_text="Size of the file.")),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("replaced_at", models.DateTimeField(help_text="When its arrays went elsewhere; null = it is in use.", null=True)),
        ], # The segments that wait for the sweep.
        options={"indexes": [models.Index(condition=models.Q(("replaced_at__isnull", False)), fields=["replaced_at"], name="segment_replaced")]}),
        migrations.CreateModel("StoredTrajectory", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="trajectories", to="rollouts.run")),
            ("external_id", models.CharField(max_length=200)),
            ("index", models.PositiveIntegerField(help_text="Position in its run.")),
            ("group", models.CharField(blank=True, help_text="Trajectories of one prompt share it.", max_length=200)),
            ("status", models.CharField(choices=[("queued", "Queued"), ("running", "Running"), ("done", "Done"), ("failed", "Failed"),
                ("cancelled", "Cancelled")], default="done", max_length=10)),
            ("error", models.TextField(blank=True)),
            ("stop_reason", models.CharField(blank=True, max_length=60)),
            ("reward", models.FloatField(null=True)),
            ("reward_parts", models.JSONField(default=dict)),
            ("task", models.ForeignKey(help_text="Of a launch.", null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("seed", models.BigIntegerField(null=True)),
            ("training_step", models.PositiveIntegerField(help_text="Of the trainer; null = not recorded.", null=True)),
            ("tokenizer_name", models.CharField(blank=True, help_text="As the source gives it.", max_length=200)),
            ("extra", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("finished_at", models.DateTimeField(null=True)),
            ("attempt", models.PositiveIntegerField(default=0)),
            ("lease_until", models.DateTimeField(null=True)),
            ("n_steps", models.PositiveIntegerField(default=0)),
            ("n_rows", models.PositiveIntegerField(default=0)),
            ("n_tokens", models.PositiveIntegerField(default=0, help_text="New tokens: deltas and completions.")),
            ("n_sampled", models.PositiveIntegerField(default=0)),
            ("n_trained", models.PositiveIntegerField(default=0)),
            ("n_lost", models.PositiveIntegerField(help_text="Sampled tokens that no row trains as they were sampled. None = not known.", null=True)),
            ("prompt_line", models.CharField(help_text="First line of the task; null = an older version stored it.", max_length=160, null=True)),
            ("answer_line", models.CharField(help_text="First line of the last answer.", max_length=160, null=True)),
            ("n_findings", models.PositiveIntegerField(default=0)),
            ("worst_severity", models.CharField(blank=True, max_length=10)),
            ("checks", models.JSONField(help_text="Check -> passed, noted, failed, or the fields that it lacks. None = not known.", null=True)),
            ("gap", models.JSONField(help_text="``GapFigures`` of its rows; None = no row has the log-probabilities of both sides.", null=True)),
        ], options={
            "constraints": [
                models.UniqueConstraint(fields=("run", "index"), name="trajectory_index_in_run"),
                models.UniqueConstraint(fields=("run", "external_id"), name="trajectory_external_id_in_run"),
            ],
            "db_table": "rollouts_trajectory",
            "indexes": [
                # The list of a run in its own order.
                models.Index(fields=["run", "index"], include=FILTERED, name="trajectory_in_order"),
                # The list of a run sorted by reward, by length, by number of findings, by number of rows. Equal
                # ones are sorted by index, so no database index can be read backwards for the other order.
                models.Index(fields=["run", "reward", "index"], include=FILTERED, name="trajectory_by_reward"),
                models.Index(fields=["run", "-reward", "index"], include=FILTERED, name="trajectory_by_best"),
                models.Index(fields=["run", "n_tokens", "index"], include=FILTERED, name="trajectory_by_tokens"),
                models.Index(fields=["run", "-n_tokens", "index"], include=FILTERED, name="trajectory_by_longest"),
                models.Index(fields=["run", "-n_findings", "index"], include=FILTERED, name="trajectory_by_findings"),
                models.Index(fields=["run", "-n_rows", "index"], include=FILTERED, name="trajectory_by_rows"),
                # Siblings: trajectories of one prompt.
                models.Index(fields=["run", "group", "index"], name="trajectory_by_group"),
                # The trajectories of one training step, and of several.
                models.Index(
                    condition=models.Q(("training_step__isnull", False)), fields=["run", "training_step", "index"], name="trajectory_by_training_step"
                ),
                # What a worker may take next.
                models.Index(fields=["run", "status", "index"], name="trajectory_by_status"),
                # How many trajectories of a run have which worst severity, for the list of runs.
                models.Index(condition=models.Q(("worst_severity", ""), _negated=True), fields=["run", "worst_severity"], name="trajectory_by_worst"),
                # What an older version stored without the lines of lists.
                models.Index(condition=models.Q(("prompt_line__isnull", True), ("status", "done")), fields=["id"], name="trajectory_without_lines"),
            ],
        }),
        migrations.CreateModel("StoredStep", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("segment", models.ForeignKey(db_index=False, help_text="The file with its arrays; null = the database has them.", null=True,
                on_delete=DO_NOTHING, related_name="+", to="rollouts.tokensegment")),
            ("segment_offset", models.PositiveIntegerField(help_text="Its row in the file.", null=True)),
            ("trajectory", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="steps", to="rollouts.storedtrajectory")),
            ("index", models.PositiveIntegerField()),
            ("parent", models.ForeignKey(null=True, on_delete=CASCADE, related_name="children", to="rollouts.storedstep")),
            ("shared_length", models.PositiveIntegerField(default=0, help_text="Leading prompt ids shared with the parent's stream.")),
            ("parent_length", models.PositiveIntegerField(default=0, help_text="Length of the parent's stream.")),
            ("prompt_length", models.PositiveIntegerField()),
            ("completion_length", models.PositiveIntegerField()),
            ("row_index", models.PositiveIntegerField(default=0, help_text="The row that trains this step.")),
            ("finish_reason", models.CharField(blank=True, max_length=30)),
            ("stop_reason", models.CharField(blank=True, max_length=100)),
            ("logprobs_mode", models.CharField(blank=True, max_length=20)),
            ("temperature", models.FloatField(null=True)),
            ("top_p", models.FloatField(null=True)),
            ("top_k", models.IntegerField(null=True)),
            ("engine", models.CharField(blank=True, max_length=60)),
            ("policy_version", models.CharField(blank=True, max_length=100)),
            ("chat_template_sha256", models.CharField(blank=True, help_text="Empty = the run's own.", max_length=64)),
            ("messages_shared", models.PositiveIntegerField(default=0)),
            ("messages_new", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("tools", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("template_kwargs", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("reply", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("text", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("extra", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("has_entropy", models.BooleanField(help_text="Whether the entropy of its completion is kept; null = no.", null=True)),
            ("n_alternatives", models.PositiveSmallIntegerField(help_text="Alternatives that are kept for each sampled token; null = none.", null=True)),
            ("has_origin", models.BooleanField(help_text="Of a step in a segment: whether its delta has origins.", null=True)),
        ], options={
            "constraints": [models.UniqueConstraint(fields=("trajectory", "index"), name="step_index_in_trajectory")],
            "db_table": "rollouts_step",
            "indexes": [
                # The few steps with a break among millions.
                models.Index(condition=models.Q(("shared_length__lt", models.F("parent_length"))), fields=["trajectory", "index"], name="step_broken"),
                # Whether anything still names a segment.
                models.Index(condition=models.Q(("segment__isnull", False)), fields=["segment"], name="step_in_segment"),
            ],
        }),
        migrations.CreateModel("StepTokens", [
            ("step", models.OneToOneField(on_delete=CASCADE, primary_key=True, related_name="tokens", serialize=False, to="rollouts.storedstep")),
            ("delta_ids", IdsField(help_text="prompt_ids[shared_length:]")),
            ("delta_origin", OriginsField(null=True)),
            ("completion_ids", IdsField()),
            ("logprobs", FloatsField(null=True)),
            ("entropy", FloatsField(null=True)),
            ("alternative_ids", IdsField(help_text="The likeliest ids at each token, one token after the other.", null=True)),
            ("alternative_logprobs", FloatsField(null=True)),
        ]),
        migrations.CreateModel("StoredRow", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("segment", models.ForeignKey(db_index=False, help_text="The file with its arrays; null = the database has them.", null=True,
                on_delete=DO_NOTHING, related_name="+", to="rollouts.tokensegment")),
            ("segment_offset", models.PositiveIntegerField(help_text="Its row in the file.", null=True)),
            ("trajectory", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="rows", to="rollouts.storedtrajectory")),
            ("index", models.PositiveIntegerField()),
            ("last_step", models.ForeignKey(null=True, on_delete=CASCADE, related_name="+", to="rollouts.storedstep")),
            ("n_tokens", models.PositiveIntegerField()),
            ("n_trained", models.PositiveIntegerField()),
            ("step_indices", models.JSONField(default=list, help_text="Steps whose completions it trains.")),
            ("extra", models.ForeignKey(null=True, on_delete=PROTECT, related_name="+", to="rollouts.content")),
            ("column_names", models.JSONField(help_text="The trainer's columns in the file; null = ``RowColumn``.", null=True)),
        ], options={
            "constraints": [models.UniqueConstraint(fields=("trajectory", "index"), name="row_index_in_trajectory")],
            "db_table": "rollouts_row",
            # Whether anything still names a segment.
            "indexes": [models.Index(condition=models.Q(("segment__isnull", False)), fields=["segment"], name="row_in_segment")],
        }),
        migrations.CreateModel("RowTokens", [
            ("row", models.OneToOneField(on_delete=CASCADE, primary_key=True, related_name="tokens", serialize=False, to="rollouts.storedrow")),
            ("ids", IdsField()),
            ("loss_mask", MaskField()),
            ("logprobs", FloatsField(null=True)),
            ("origin", OriginsField(null=True)),
        ]),
        migrations.CreateModel("RowColumn", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("row", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="columns", to="rollouts.storedrow")),
            ("name", models.CharField(max_length=60)),
            ("values", FloatsField()),
        ], options={"constraints": [models.UniqueConstraint(fields=("row", "name"), name="column_name_in_row")]}),
        migrations.CreateModel("StoredFinding", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("trajectory", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="findings", to="rollouts.storedtrajectory")),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="findings", to="rollouts.run")),
            ("step_index", models.PositiveIntegerField(null=True)),
            ("row_index", models.PositiveIntegerField(null=True)),
            ("axis", models.CharField(max_length=10)),
            ("kind", models.CharField(max_length=40)),
            ("severity", models.CharField(max_length=10)),
            ("start", models.PositiveIntegerField()),
            ("stop", models.PositiveIntegerField()),
            ("expected_ids", IdsField()),
            ("actual_ids", IdsField()),
            ("expected_text", models.TextField(blank=True)),
            ("actual_text", models.TextField(blank=True)),
            ("message_index", models.PositiveIntegerField(null=True)),
            ("evidence", models.TextField()),
            ("remedy", models.TextField(blank=True)),
            ("missing", models.CharField(blank=True, max_length=200)),
            ("places", IdsField(help_text="Start and stop of every stretch, when there are several.", null=True)),
            ("trained_tokens_lost", models.PositiveIntegerField(default=0, help_text="None = not known.", null=True)),
            ("trained_tokens_wrong", models.PositiveIntegerField(default=0, help_text="None = not known.", null=True)),
            ("rows", models.PositiveIntegerField(default=1)),
            ("prompt_tokens_repaid", models.PositiveIntegerField(default=0)),
            ("lost_in_one_row", models.PositiveIntegerField(default=0)),
            ("version", models.PositiveIntegerField(help_text="Of the diagnosis that made it.")),
        ], options={
            "db_table": "rollouts_finding",
            "indexes": [
                # The findings of one trajectory, in reading order; whether one of them is of a kind and severity.
                models.Index(fields=["trajectory", "step_index", "start"], include=("run", "kind", "severity"), name="finding_in_trajectory"),
                # Trajectories of a run that have a finding of a kind, at a step; and how many, by kind and by
                # step.
                models.Index(fields=["run", "kind", "step_index", "trajectory"], include=("severity",), name="finding_by_kind"),
                # Trajectories with a finding of any kind at a step.
                models.Index(fields=["run", "step_index", "trajectory"], include=("severity",), name="finding_by_step"),
                # Trajectories with a finding of a severity.
                models.Index(fields=["run", "severity", "trajectory"], name="finding_by_severity"),
            ],
        }),
        migrations.CreateModel("Retokenized", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("trajectory", models.OneToOneField(on_delete=CASCADE, related_name="retokenized", to="rollouts.storedtrajectory")),
            ("files_sha256", models.CharField(help_text="Of the tokenizer that encoded.", max_length=64)),
            ("streams", IdsField(help_text="Of each stream: step or -1, row or -1, CRC-32 of its ids, number of its drifts.")),
            ("drifts", IdsField(help_text="Of each drift: start, stop, number of ids in its place, 1 if it is no UTF-8.")),
            ("expected_ids", IdsField(help_text="The ids in place of all drifts.")),
        ]),
        migrations.CreateModel("Replay", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("trajectory", models.OneToOneField(on_delete=CASCADE, related_name="replay", to="rollouts.storedtrajectory")),
            ("key", models.CharField(help_text="Hash of all that it follows from; another one makes it stale.", max_length=64)),
            ("report", models.JSONField(help_text="The figures of each strategy.", null=True)),
        ]),
        migrations.CreateModel("ReplayRows", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("replay", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="rows", to="rollouts.replay")),
            ("strategy", models.CharField(max_length=40)),
            ("lengths", models.JSONField(help_text="Tokens of each row.")),
            ("ids", IdsField()),
            ("loss_mask", MaskField()),
            ("origin", OriginsField(null=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("replay", "strategy"), name="strategy_in_replay")]}),
        migrations.CreateModel("ParserAudit", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("trajectory", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="parser_audits", to="rollouts.storedtrajectory")),
            ("step_index", models.PositiveIntegerField()),
            ("key", models.CharField(help_text="Hash of all that it follows from; another one makes it stale.", max_length=64)),
            ("report", models.JSONField(help_text="What each parser read, with its tokens.", null=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("trajectory", "step_index"), name="parser_audit_of_step")]}),
        migrations.CreateModel("ScoredColumn", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="scored_columns", to="rollouts.run")),
            ("model", models.CharField(help_text="Name of the served model.", max_length=200)),
            ("engine", models.CharField(max_length=60)),
            ("engine_version", models.CharField(blank=True, max_length=60)),
            ("weights", models.CharField(blank=True, help_text="Digest of the weights' files; empty = a server's.", max_length=64)),
            ("temperature", models.FloatField(default=1.0)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("created_by", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("finished_at", models.DateTimeField(help_text="null = not every trajectory was scored, so nobody reads it.", null=True)),
            ("n_trajectories", models.PositiveIntegerField(default=0)),
            ("n_tokens", models.PositiveBigIntegerField(default=0, help_text="Tokens that have a score.")),
            ("gap", models.JSONField(help_text="Scores minus the sampler's: ``GapFigures``; null = it has none.", null=True)),
        ], options={
            "constraints": [
                models.UniqueConstraint(fields=("run", "model", "engine", "engine_version", "weights", "temperature"), name="one_column_of_an_engine")
            ]
        }),
        migrations.CreateModel("RowScores", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("column", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="scores", to="rollouts.scoredcolumn")),
            ("trajectory", models.ForeignKey(on_delete=CASCADE, related_name="scores", to="rollouts.storedtrajectory")),
            ("rows", IdsField(help_text="Of each row: number of its ids, CRC-32 of its ids.")),
            ("values", FloatsField(help_text="Log-probabilities of all rows, one row after the other; NaN = no score.")),
            ("gap", models.JSONField(help_text="``GapFigures`` of the trajectory; null = no token can be compared.", null=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("column", "trajectory"), name="scores_once_in_column")]}),
        migrations.CreateModel("TemplateCheck", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(default=default_project, on_delete=PROTECT, related_name="checks", to="rollouts.project")),
            ("code", models.CharField(help_text="From the hash of the question.", max_length=16, unique=True)),
            ("tokenizer", models.ForeignKey(null=True, on_delete=SET_NULL, to="rollouts.tokenizer")),
            ("chat_template", models.ForeignKey(on_delete=PROTECT, to="rollouts.chattemplate")),
            ("label", models.CharField(blank=True, help_text="The project's name for the template.", max_length=200)),
            ("question", models.JSONField(default=dict, help_text="tools, kwargs, own conversation.")),
            ("report", models.JSONField(help_text="rollout_inspector.text.chat_templates' report.", null=True)),
            ("cells", models.JSONField(help_text="The report in short, for the matrix: each probe with its outcome.", null=True)),
            ("version", models.PositiveIntegerField(default=0)),
            ("created_by", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={
            "indexes": [
                # The checks that were asked last: of all projects, and of one.
                models.Index(fields=["-created_at", "-id"], name="check_newest"),
                models.Index(fields=["project", "-created_at", "-id"], name="check_newest_of_project"),
            ]
        }),
        migrations.CreateModel("ShareLink", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("token_sha256", models.CharField(help_text="The token itself is shown once and not kept.", max_length=64, unique=True)),
            ("hint", models.CharField(help_text="First characters of the token, to tell links apart.", max_length=8)),
            ("run", models.ForeignKey(null=True, on_delete=CASCADE, to="rollouts.run")),
            ("trajectory", models.ForeignKey(null=True, on_delete=CASCADE, to="rollouts.storedtrajectory")),
            ("check_result", models.ForeignKey(null=True, on_delete=CASCADE, to="rollouts.templatecheck")),
            ("project", models.ForeignKey(default=default_project, help_text="Of what it opens.", on_delete=CASCADE, to="rollouts.project")),
            ("query", models.CharField(blank=True, help_text="The view that the link opens, e.g. t=1204-1260.", max_length=500)),
            ("row_index", models.PositiveIntegerField(help_text="The one row that it shows; null = everything.", null=True)),
            ("start", models.PositiveIntegerField(help_text="The first token of that row that it shows.", null=True)),
            ("stop", models.PositiveIntegerField(help_text="The first token behind those that it shows.", null=True)),
            ("note", models.CharField(blank=True, max_length=500)),
            ("created_by", models.ForeignKey(on_delete=CASCADE, to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("expires_at", models.DateTimeField()),
            ("revoked_at", models.DateTimeField(null=True)),
            ("n_opened", models.PositiveIntegerField(default=0, help_text="How often it was opened.")),
            ("opened_at", models.DateTimeField(help_text="When it was opened last.", null=True)),
        ]),
        migrations.CreateModel("Job", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("run", models.ForeignKey(null=True, on_delete=CASCADE, related_name="jobs", to="rollouts.run")),
            ("replay", models.OneToOneField(null=True, on_delete=CASCADE, to="rollouts.replay")),
            ("template_check", models.OneToOneField(null=True, on_delete=CASCADE, to="rollouts.templatecheck")),
            ("parser_audit", models.OneToOneField(null=True, on_delete=CASCADE, related_name="job", to="rollouts.parseraudit")),
            ("whole", models.ForeignKey(help_text="Of a shard: the job of which it is a part.", null=True, on_delete=CASCADE,
                related_name="shards", to="rollouts.job")),
            ("kind", models.CharField(help_text="Slug of a ``rollouts.store.jobs.jobs.JobKind``.", max_length=20)),
            ("status", models.CharField(choices=[("queued", "Queued"), ("running", "Running"), ("done", "Done"), ("failed", "Failed"),
                ("cancelled", "Cancelled")], default="queued", max_length=10)),
            ("error", models.TextField(blank=True)),
            ("remedy", models.CharField(blank=True, help_text="What helps; each page, API or command words it.", max_length=40)),
            ("options", models.JSONField(default=dict)),
            ("attempt", models.PositiveIntegerField(default=0, help_text="Goes up with each worker that takes it.")),
            ("n_done", models.PositiveIntegerField(default=0)),
            ("n_total", models.PositiveIntegerField(default=0, help_text="Trajectories it has to go through.")),
            ("progress", models.CharField(blank=True, help_text="Of a search for a repair, and of a job in shards: how far it is.", max_length=200)),
            ("reached", models.BigIntegerField(default=-1,
                help_text="Index of the last trajectory that is done for good; of a shard of an import, bytes that are read.")),
            ("n_written", models.PositiveIntegerField(default=0, help_text="Of an export: rows or trajectories in the file.")),
            ("bytes_written", models.PositiveBigIntegerField(default=0)),
            ("notes", models.JSONField(default=list, help_text="Sentences about what was left out.")),
            ("report", models.JSONField(help_text="Of a replay: figures so far, in the end of the whole run. Of a shard: what it found.", null=True)),
            ("cancel_requested", models.BooleanField(default=False)),
            ("created_by", models.ForeignKey(blank=True, null=True, on_delete=SET_NULL, to=settings.AUTH_USER_MODEL)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("heartbeat_at", models.DateTimeField(default=now, help_text="Last sign of life of the work.")),
            ("finished_at", models.DateTimeField(blank=True, null=True)),
            ("expires_at", models.DateTimeField(blank=True, help_text="When its file goes.", null=True)),
        ], options={
            "constraints": [
                # A run has one active job of each kind: a second press finds the first job.
                models.UniqueConstraint(condition=models.Q(("status__in", ("queued", "running"))), fields=("run", "kind"), name="job_at_a_time"),
                models.CheckConstraint(
                    condition=models.Q(
                        models.Q(
                            ("parser_audit__isnull", True),
                            ("replay__isnull", True),
                            ("run__isnull", False),
                            ("template_check__isnull", True),
                            ("whole__isnull", True),
                        ),
                        models.Q(
                            ("parser_audit__isnull", True),
                            ("replay__isnull", False),
                            ("run__isnull", True),
                            ("template_check__isnull", True),
                            ("whole__isnull", True),
                        ),
                        models.Q(
                            ("parser_audit__isnull", True),
                            ("replay__isnull", True),
                            ("run__isnull", True),
                            ("template_check__isnull", False),
                            ("whole__isnull", True),
                        ),
                        models.Q(
                            ("parser_audit__isnull", False),
                            ("replay__isnull", True),
                            ("run__isnull", True),
                            ("template_check__isnull", True),
                            ("whole__isnull", True),
                        ),
                        models.Q(
                            ("parser_audit__isnull", True),
                            ("replay__isnull", True),
                            ("run__isnull", True),
                            ("template_check__isnull", True),
                            ("whole__isnull", False),
                        ),
                        _connector="OR",
                    ),
                    name="job_of_one_subject",
                ),
            ],
            # What waits and what is under way, among many jobs that have ended.
            "indexes": [models.Index(condition=models.Q(("status__in", ("queued", "running"))), fields=["status"], name="job_active")],
        }),
        migrations.CreateModel("Comment", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, max_length=16, unique=True)),
            ("trajectory", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="comments", to="rollouts.storedtrajectory")),
            ("row_index", models.PositiveIntegerField(help_text="null = of the whole trajectory.", null=True)),
            ("start", models.PositiveIntegerField(help_text="The first token of that row that it is about.", null=True)),
            ("stop", models.PositiveIntegerField(help_text="The first token behind those that it is about.", null=True)),
            ("text", models.TextField()),
            ("author", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("author_name", models.CharField(help_text="It stays when the account goes.", max_length=150)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
            ("edited_at", models.DateTimeField(null=True)),
            ("version", models.PositiveIntegerField(default=1, help_text="It goes up with each edit, so that none is lost.")),
            ("resolved_at", models.DateTimeField(help_text="null = it is open.", null=True)),
            ("resolved_by", models.CharField(blank=True, help_text="The name of who resolved it.", max_length=150)),
        ], # The comments of a trajectory, in reading order; how many are open, for a list of trajectories.
        options={"indexes": [models.Index(fields=["trajectory", "row_index", "start", "id"], include=("resolved_at",), name="comment_in_trajectory")]}),
        migrations.CreateModel("Seen", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("user", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("trajectory", models.ForeignKey(on_delete=CASCADE, related_name="+", to="rollouts.storedtrajectory")),
            ("at", models.DateTimeField(auto_now_add=True)),
        ], options={"constraints": [models.UniqueConstraint(fields=("user", "trajectory"), name="seen_once")]}),
        migrations.CreateModel("MutedKind", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(on_delete=CASCADE, related_name="+", to="rollouts.project")),
            ("kind", models.CharField(max_length=40)),
            ("run", models.ForeignKey(help_text="null = of any run.", null=True, on_delete=CASCADE, related_name="+", to="rollouts.run")),
            ("chat_template", models.ForeignKey(help_text="null = whatever the template.", null=True, on_delete=CASCADE, related_name="+",
                to="rollouts.chattemplate")),
            ("reason", models.CharField(max_length=500)),
            ("author", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("author_name", models.CharField(help_text="It stays when the account goes.", max_length=150)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ]),
        migrations.CreateModel("AlarmRule", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.ForeignKey(on_delete=CASCADE, related_name="+", to="rollouts.project")),
            ("run", models.ForeignKey(help_text="null = of any run.", null=True, on_delete=CASCADE, related_name="+", to="rollouts.run")),
            ("figure", models.CharField(help_text="A value of rollout_inspector.diagnose.alarm_rules.AlarmFigure.", max_length=20)),
            ("kind", models.CharField(blank=True, help_text="Of the findings, for the figure “finding” alone.", max_length=40)),
            ("limit", models.FloatField(help_text="null = the alarm is switched off.", null=True)),
            ("author", models.ForeignKey(null=True, on_delete=SET_NULL, related_name="+", to=settings.AUTH_USER_MODEL)),
            ("author_name", models.CharField(help_text="It stays when the account goes.", max_length=150)),
            ("created_at", models.DateTimeField(auto_now_add=True)),
        ], options={
            "constraints": [
                models.UniqueConstraint(condition=models.Q(("run", None)), fields=("project", "figure", "kind"), name="alarm_rule_of_project"),
                models.UniqueConstraint(fields=("run", "figure", "kind"), name="alarm_rule_of_run"),
            ]
        }),
        migrations.CreateModel("Alarm", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("code", models.CharField(default=new_code, help_text="Names its delivery.", max_length=16, unique=True)),
            ("run", models.ForeignKey(db_index=False, on_delete=CASCADE, related_name="alarms", to="rollouts.run")),
            ("figure", models.CharField(max_length=20)),
            ("kind", models.CharField(blank=True, max_length=40)),
            ("holds", models.BooleanField(default=True, help_text="False = no step is above the limit any more.")),
            ("limit", models.FloatField()),
            ("first_step", models.PositiveIntegerField()),
            ("last_step", models.PositiveIntegerField()),
            ("n_steps", models.PositiveIntegerField()),
            ("worst_step", models.PositiveIntegerField()),
            ("worst", models.FloatField()),
            ("baseline", models.FloatField(null=True)),
            ("raised_at", models.DateTimeField(default=now)),
            ("n_tries", models.PositiveIntegerField(default=0, help_text="How often its delivery was tried.")),
            ("delivered_at", models.DateTimeField(help_text="null = the webhook has not taken it.", null=True)),
            ("error", models.CharField(blank=True, help_text="Why the last try failed.", max_length=300)),
        ], options={
            "constraints": [models.UniqueConstraint(fields=("run", "figure", "kind"), name="alarm_of_figure")],
            # What is still to be delivered, among many alarms.
            "indexes": [models.Index(condition=models.Q(("delivered_at", None), ("holds", True)), fields=["raised_at"], name="alarm_waits")],
        }),
        migrations.CreateModel("ProjectAlarms", [
            ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ("project", models.OneToOneField(on_delete=CASCADE, related_name="alarms", to="rollouts.project")),
            ("webhook", models.CharField(blank=True, help_text="Address that takes a POST; empty = none.", max_length=500)),
            ("salt", models.CharField(default=new_code, help_text="Makes the key of its signatures another one.", max_length=16)),
            ("since", models.DateTimeField(help_text="Alarms before it are not delivered.", null=True)),
            ("n_failures", models.PositiveIntegerField(default=0, help_text="Tries that failed since the last one that did not.")),
            ("next_try_at", models.DateTimeField(default=now)),
            ("error", models.CharField(blank=True, max_length=300)),
            ("delivered_at", models.DateTimeField(null=True)),
            ("rules_changed_at", models.DateTimeField(null=True)),
            ("checked_at", models.DateTimeField(help_text="Every run was checked by the rules as they were then.", null=True)),
        ]),
        migrations.RunPython(make_default_project, migrations.RunPython.noop),
        migrations.RunPython(vacuum_often, migrations.RunPython.noop),
        migrations.RunPython(count_pairs, migrations.RunPython.noop),
        migrations.RunPython(index_ids, migrations.RunPython.noop),
    ]
