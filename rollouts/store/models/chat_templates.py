"""Chat templates, and what projects call them."""

from django.db import models

from rollouts.store.models.people import Project, default_project


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


class Tokenizer(models.Model):
    """A registered tokenizer: files of the storage that are named by their contents."""

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="tokenizers")
    name = models.CharField(max_length=200, help_text="Unique in its project.")
    sha256 = models.CharField(max_length=64, db_index=True, help_text="Of tokenizer.json.")
    files_sha256 = models.CharField(max_length=64, help_text="Names its files in the storage; empty = they are lost.")
    source = models.CharField(max_length=500, help_text="Where it came from: name of a folder, upload, or hub id.")
    revision = models.CharField(max_length=100, blank=True, help_text="Of a hub id.")
    vocab_size = models.PositiveIntegerField()
    encoder = models.CharField(max_length=20, help_text="fastokens or tokenizers: which encoder was found exact.")
    chat_template = models.ForeignKey(ChatTemplate, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="tokenizer_name_in_project")]

    def __str__(self) -> str:
        return self.name
