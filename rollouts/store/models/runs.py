"""Runs, the figures of large runs, and the lines that an import could not read."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from rollouts.store.models.chat_templates import ChatTemplate, Tokenizer
from rollouts.store.models.codes import new_code
from rollouts.store.models.people import Project, default_project
from rollouts.store.models.work_status import WorkStatus


class Run(models.Model):
    """One launch or one import."""

    makers_shown = True  # Not stored. False for the visitor of a share link, who learns no name of an account.

    class Kind(models.TextChoices):
        LAUNCH = "launch"  # Trajectories that are sampled here.
        IMPORT = "import"  # Trajectories that were sampled elsewhere and come from files or pushes.

    Status = WorkStatus

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="runs")
    code = models.CharField(max_length=16, unique=True, default=new_code)
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=10, choices=Kind.choices)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.QUEUED)
    error = models.TextField(blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    heartbeat_at = models.DateTimeField(null=True, blank=True, help_text="Last sign of life of the work.")
    cancel_requested = models.BooleanField(default=False)

    model = models.CharField(max_length=200, blank=True)
    token_store = models.CharField(
        max_length=20,
        default="database",
        help_text="Where its token arrays go: a name of ``rollouts.store.token_arrays``.",
    )
    engine = models.CharField(max_length=60, blank=True)
    environment = models.CharField(max_length=60, blank=True)
    strategy = models.CharField(max_length=40, blank=True)
    tokenizer = models.ForeignKey(Tokenizer, null=True, blank=True, on_delete=models.SET_NULL)
    chat_template = models.ForeignKey(ChatTemplate, null=True, blank=True, on_delete=models.SET_NULL)
    rows_chat_template = models.ForeignKey(
        ChatTemplate,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Of a launch whose rows are made with another template than its prompts; empty = the same.",
    )
    format = models.CharField(max_length=200, blank=True, help_text="Of an import: the formats that were recognised.")
    settings = models.JSONField(
        default=dict, help_text="What the form asked for: prompts, group, sampling, seed, limits."
    )

    # Totals are written when work is saved, so that no page counts.
    n_expected = models.PositiveIntegerField(default=0, help_text="Trajectories a launch will make.")
    n_trajectories = models.PositiveIntegerField(default=0)
    n_finished = models.PositiveIntegerField(default=0)
    n_failed = models.PositiveIntegerField(default=0)
    n_steps = models.PositiveIntegerField(default=0)
    n_rows = models.PositiveIntegerField(default=0)
    n_tokens = models.PositiveBigIntegerField(default=0, help_text="New tokens stored: deltas and completions.")
    n_sampled = models.PositiveBigIntegerField(default=0)
    n_rejected = models.PositiveIntegerField(default=0)
    n_rewards = models.PositiveIntegerField(default=0, help_text="Trajectories that have a reward.")
    reward_sum = models.FloatField(default=0.0)
    finding_counts = models.JSONField(default=dict, help_text="kind -> number of findings.")
    diagnosis_version = models.PositiveIntegerField(
        null=True, help_text="The oldest version that diagnosed a trajectory of the run; null = none has."
    )
    bytes_done = models.PositiveBigIntegerField(default=0, help_text="Of an import: how far the reader is.")
    bytes_total = models.PositiveBigIntegerField(default=0)

    class Meta:
        indexes = [
            # The list of runs, newest first: of all projects, and of one.
            models.Index(fields=["-created_at", "-id"], name="run_newest"),
            models.Index(fields=["project", "-created_at", "-id"], name="run_newest_of_project"),
            # Runs that are not finished, for workers that look for work and for the page of workers.
            models.Index(fields=["created_at", "id"], condition=Q(status__in=("queued", "running")), name="run_active"),
        ]

    @property
    def n_ended(self) -> int:
        """Trajectories that are done or failed, so that they are diagnosed: shares of findings are of these."""
        return self.n_finished + self.n_failed

    def __str__(self) -> str:
        return f"{self.name} ({self.code})"


class RunTag(models.Model):
    """A word by which people find a run again."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="tags")
    name = models.CharField(max_length=40)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="tag_once_on_run")]
        indexes = [
            # The runs with a tag, and the tags that there are.
            models.Index(fields=["name", "run"], name="tag_by_name")
        ]


class RunFigures(models.Model):
    """The figures on the pages of a large run. The worker that ended the run counts them once."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="figures")
    state = models.CharField(max_length=64, help_text="Hash of the totals it was counted at; others make it stale.")
    body = models.JSONField(help_text="``rollouts.store.runs.figures.count``.")


class Rejection(models.Model):
    """A line of an imported file that could not be read."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="rejections")
    file = models.CharField(max_length=500)
    line = models.PositiveIntegerField(null=True)
    reason = models.TextField()
