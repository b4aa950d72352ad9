"""Background work."""

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from rollouts.store.models.codes import new_code
from rollouts.store.models.replays import Replay
from rollouts.store.models.runs import Run
from rollouts.store.models.template_checks import ParserAudit, TemplateCheck
from rollouts.store.models.trajectories import StoredTrajectory
from rollouts.store.models.work_status import WorkStatus

SUBJECTS = ("run", "replay", "template_check", "parser_audit", "whole")  # The columns of which a job has one.


def _only(name: str) -> Q:
    return Q(**{f"{column}__isnull": column != name for column in SUBJECTS})


class Job(models.Model):
    """Background work of the queue ``default``. It belongs to one run, replay, template check or parser audit. A run
    keeps the jobs that were asked for. The others have one job: the last one. A large job is cut into shards, which any
    workers do. A shard is a job that belongs to the whole one, and goes when that has ended."""

    Status = WorkStatus

    code = models.CharField(max_length=16, unique=True, default=new_code)
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="jobs")
    replay = models.OneToOneField(Replay, null=True, on_delete=models.CASCADE)
    template_check = models.OneToOneField(TemplateCheck, null=True, on_delete=models.CASCADE)
    parser_audit = models.OneToOneField(ParserAudit, null=True, on_delete=models.CASCADE, related_name="job")
    whole = models.ForeignKey(
        "self", null=True, on_delete=models.CASCADE, related_name="shards",
        help_text="Of a shard: the job of which it is a part.",
    )
    kind = models.CharField(max_length=20, help_text="Slug of a ``rollouts.store.jobs.jobs.JobKind``.")
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.QUEUED)
    error = models.TextField(blank=True)
    remedy = models.CharField(max_length=40, blank=True, help_text="What helps; each page, API or command words it.")
    options = models.JSONField(default=dict)
    attempt = models.PositiveIntegerField(default=0, help_text="Goes up with each worker that takes it.")
    n_done = models.PositiveIntegerField(default=0)
    n_total = models.PositiveIntegerField(default=0, help_text="Trajectories it has to go through.")
    progress = models.CharField(
        max_length=200, blank=True, help_text="Of a search for a repair, and of a job in shards: how far it is."
    )
    reached = models.BigIntegerField(
        default=-1,
        help_text="Index of the last trajectory that is done for good; of a shard of an import, bytes that are read.",
    )
    n_written = models.PositiveIntegerField(default=0, help_text="Of an export: rows or trajectories in the file.")
    bytes_written = models.PositiveBigIntegerField(default=0)
    notes = models.JSONField(default=list, help_text="Sentences about what was left out.")
    report = models.JSONField(
        null=True, help_text="Of a replay: figures so far, in the end of the whole run. Of a shard: what it found."
    )
    cancel_requested = models.BooleanField(default=False)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(default=timezone.now, help_text="Last sign of life of the work.")
    finished_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="When its file goes.")

    class Meta:
        constraints = [
            # A run has one active job of each kind: a second press finds the first job.
            models.UniqueConstraint(
                fields=["run", "kind"], condition=Q(status__in=("queued", "running")), name="job_at_a_time"
            ),
            models.CheckConstraint(
                condition=_only("run")
                | _only("replay")
                | _only("template_check")
                | _only("parser_audit")
                | _only("whole"),
                name="job_of_one_subject",
            ),
        ]
        indexes = [
            # What waits and what is under way, among many jobs that have ended.
            models.Index(fields=["status"], name="job_active", condition=Q(status__in=("queued", "running"))),
        ]

    @property
    def subject(self) -> Run | StoredTrajectory | TemplateCheck | None:
        """The run, trajectory or template check that it works on; None for a shard."""
        of_trajectory = self.replay or self.parser_audit
        return self.run or (of_trajectory.trajectory if of_trajectory is not None else self.template_check)
