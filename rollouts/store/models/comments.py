"""What people say of a trajectory to each other."""

from django.conf import settings
from django.db import models

from rollouts.store.models.codes import new_code
from rollouts.store.models.trajectories import StoredTrajectory


class Comment(models.Model):
    """A remark on a range of tokens of a row, or on a whole trajectory."""

    code = models.CharField(max_length=16, unique=True, default=new_code)
    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="comments")
    row_index = models.PositiveIntegerField(null=True, help_text="null = of the whole trajectory.")
    start = models.PositiveIntegerField(null=True, help_text="The first token of that row that it is about.")
    stop = models.PositiveIntegerField(null=True, help_text="The first token behind those that it is about.")
    text = models.TextField()
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(max_length=150, help_text="It stays when the account goes.")
    created_at = models.DateTimeField(auto_now_add=True)
    edited_at = models.DateTimeField(null=True)
    version = models.PositiveIntegerField(default=1, help_text="It goes up with each edit, so that none is lost.")
    resolved_at = models.DateTimeField(null=True, help_text="null = it is open.")
    resolved_by = models.CharField(max_length=150, blank=True, help_text="The name of who resolved it.")

    class Meta:
        indexes = [
            # The comments of a trajectory, in reading order; how many are open, for a list of trajectories.
            models.Index(
                fields=["trajectory", "row_index", "start", "id"],
                include=("resolved_at",),
                name="comment_in_trajectory",
            ),
        ]


class Seen(models.Model):
    """A user says to have looked at a trajectory. Nobody else sees it."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+", db_index=False)
    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, related_name="+")
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user", "trajectory"], name="seen_once")]
