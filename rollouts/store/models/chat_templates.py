"""Chat templates, and what projects call them."""

from django.db import models

from rollouts.store.models.people import Project


class ChatTemplate(models.Model):
    """A Jinja chat template, identified by the sha256 of its bytes. ``ProjectTemplate`` says who knows it."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)


class ProjectTemplate(models.Model):
    """A chat template as one project knows it: the text is stored once, its name is the project's."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    chat_template = models.ForeignKey(ChatTemplate, on_delete=models.CASCADE, related_name="names")
    label = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "chat_template"], name="template_in_project")]

    def __str__(self) -> str:
        return template_name(self.label, self.chat_template_id)


def template_name(label: str, sha256: str) -> str:
    """What pages call a chat template."""
    return label or f"unnamed template {sha256[:8]}"
