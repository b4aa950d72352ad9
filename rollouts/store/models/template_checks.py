"""Checks of chat templates."""

from django.conf import settings
from django.db import models

from rollouts.store.models.chat_templates import ChatTemplate, Tokenizer, template_name
from rollouts.store.models.people import Project, default_project
from rollouts.store.models.trajectories import StoredTrajectory
from rollouts.store.models.work_status import ACTIVE, WorkStatus


class TemplateCheck(models.Model):
    """A chat-template check: the same question has the same code. ``job`` answers it, then looks for a repair."""

    Status = WorkStatus

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="checks")
    code = models.CharField(max_length=16, unique=True, help_text="From the hash of the question.")
    tokenizer = models.ForeignKey(Tokenizer, null=True, on_delete=models.SET_NULL)
    chat_template = models.ForeignKey(ChatTemplate, on_delete=models.PROTECT)
    label = models.CharField(max_length=200, blank=True, help_text="The project's name for the template.")
    question = models.JSONField(default=dict, help_text="tools, kwargs, own conversation.")
    report = models.JSONField(null=True, help_text="rollout_inspector.text.chat_templates' report.")
    cells = models.JSONField(null=True, help_text="The report in short, for the matrix: each probe with its outcome.")
    version = models.PositiveIntegerField(default=0)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [
            # The checks that were asked last: of all projects, and of one.
            models.Index(fields=["-created_at", "-id"], name="check_newest"),
            models.Index(fields=["project", "-created_at", "-id"], name="check_newest_of_project"),
        ]

    @property
    def template_name(self) -> str:
        """What pages call its chat template."""
        return template_name(self.label, self.chat_template_id)

    @property
    def is_answered(self) -> bool:
        """Whether the report is stored: by the current job, or before a job that looks for a repair alone."""
        return self.job.kind == "repair_template" or self.job.n_done > 0

    @property
    def status(self) -> str:
        """The state of the job; done as soon as the report is stored, although the search for a repair may continue."""
        return WorkStatus.DONE if self.is_answered else self.job.status

    @property
    def error(self) -> str:
        """Why the check failed; empty = it did not."""
        return "" if self.is_answered else self.job.error

    @property
    def progress(self) -> str:
        """How far the search for a repair is; empty = no search is under way."""
        searching = self.is_answered and self.job.status in ACTIVE
        return (self.job.progress or "waiting for a worker") if searching else ""


class ParserAudit(models.Model):
    """What every parser read of the reply of a step. It is made again only when ``key`` has changed, or when asked."""

    trajectory = models.ForeignKey(
        StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="parser_audits"
    )
    step_index = models.PositiveIntegerField()
    key = models.CharField(max_length=64, help_text="Hash of all that it follows from; another one makes it stale.")
    report = models.JSONField(null=True, help_text="What each parser read, with its tokens.")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["trajectory", "step_index"], name="parser_audit_of_step")]
