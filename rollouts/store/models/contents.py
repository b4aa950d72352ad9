"""JSON that is stored once, however many steps and trajectories name it."""

from django.db import models


class Content(models.Model):
    """JSON text stored once by its hash: messages, tools, template kwargs, replies, tasks."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    body = models.TextField()
