"""Reads files that are named on the command line."""

from __future__ import annotations

from pathlib import Path

from django.core.management.base import CommandError

from rollout_inspector.guard.text_files import read_text
from rollout_inspector.text import chat_templates
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import ChatTemplate, Project


def read_chat_template(path: str | Path) -> str:
    """A chat template that renders. Raises :class:`CommandError` with the line that cannot be used."""
    text = read_text(path, "The chat template")
    if "\0" in text or not text.strip():
        raise CommandError(f"{path} holds no template text. Name another file.")
    if problem := chat_templates.cannot_render(chat_templates.renderer(None, text)):
        raise CommandError(f"The chat template {path} cannot be used. {problem} Mend it, or name another file.")
    return text


def registered_chat_template(path: str | Path, project: Project) -> ChatTemplate:
    """The same template, stored in a project under the file's name."""
    return register_chat_template(read_chat_template(path), Path(path).stem, project)
