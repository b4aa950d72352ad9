"""Kinds of findings that a project knows and does not want to meet first."""

from django.conf import settings
from django.db import models

from rollouts.store.models.chat_templates import ChatTemplate
from rollouts.store.models.people import Project
from rollouts.store.models.runs import Run


class MutedKind(models.Model):
    """A rule: findings of this kind are muted, in one run, in the runs with one chat template, or in the project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=40)
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="+", help_text="null = of any run.")
    chat_template = models.ForeignKey(
        ChatTemplate, null=True, on_delete=models.CASCADE, related_name="+", help_text="null = whatever the template."
    )
    reason = models.CharField(max_length=500)
    author = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    author_name = models.CharField(max_length=150, help_text="It stays when the account goes.")
    created_at = models.DateTimeField(auto_now_add=True)
