"""Where work stands."""

from django.db import models


class WorkStatus(models.TextChoices):
    """Where a run, a trajectory or a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # ``error`` says why.
    CANCELLED = "cancelled"


ACTIVE = (WorkStatus.QUEUED, WorkStatus.RUNNING)  # Work with one of these states still changes.
