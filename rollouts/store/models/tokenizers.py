"""Registered tokenizers."""

from django.db import models

from rollouts.store.models.chat_templates import ChatTemplate
from rollouts.store.models.people import Project, default_project


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
