"""Files of the storage that hold token arrays."""

from django.db import models
from django.db.models import Q

from rollouts.store.models.runs import Run


class TokenSegment(models.Model):
    """An immutable file with the arrays of many steps and rows of a run, in the file storage. The file is there before
    the row is. A file without a row, and a row that nothing names any more, are swept later."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="token_segments")
    key = models.CharField(max_length=200, unique=True, help_text="Of the file in the storage.")
    n_items = models.PositiveIntegerField(help_text="Steps and rows in the file.")
    n_tokens = models.PositiveBigIntegerField(help_text="Ids in the file.")
    n_bytes = models.PositiveBigIntegerField(help_text="Size of the file.")
    created_at = models.DateTimeField(auto_now_add=True)
    replaced_at = models.DateTimeField(null=True, help_text="When its arrays went elsewhere; null = it is in use.")

    class Meta:
        indexes = [
            # The segments that wait for the sweep.
            models.Index(fields=["replaced_at"], name="segment_replaced", condition=Q(replaced_at__isnull=False)),
        ]


class InSegment(models.Model):
    """Where the arrays of a step or a row lie."""

    segment = models.ForeignKey(
        TokenSegment, null=True, on_delete=models.DO_NOTHING, related_name="+", db_index=False,
        help_text="The file with its arrays; null = the database has them.",
    )
    segment_offset = models.PositiveIntegerField(null=True, help_text="Its row in the file.")

    class Meta:
        abstract = True


class Content(models.Model):
    """JSON text stored once by its hash: messages, tools, template kwargs, replies, tasks."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    body = models.TextField()
