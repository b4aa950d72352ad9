"""Registered tokenizers and chat templates. Each function is one query."""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet

from rollouts.models import ChatTemplate, Tokenizer


def list_tokenizers() -> QuerySet[Tokenizer]:
    """Every registered tokenizer by name. The query runs when the result is read, so a form can use it as choices."""
    return Tokenizer.objects.order_by("name")


def tokenizer_names(limit: int | None = None) -> list[str]:
    """The names of the first ``limit`` tokenizers; None = of all."""
    return list(list_tokenizers().values_list("name", flat=True)[:limit])


def tokenizer_named(name: str) -> Tokenizer | None:
    """The tokenizer of that name, with its chat template."""
    return Tokenizer.objects.select_related("chat_template").filter(name=name).first()


def tokenizers_with_template(texts: bool = False) -> list[Tokenizer]:
    """Tokenizers with their own chat template, by name. ``texts``: also load the templates."""
    found = list_tokenizers().exclude(chat_template=None)
    return list(found.select_related("chat_template") if texts else found)


def find_chat_template(sha256: str) -> ChatTemplate | None:
    """The chat template with that hash."""
    return ChatTemplate.objects.filter(pk=sha256).first()


def newest_chat_templates(limit: int) -> list[ChatTemplate]:
    """Hash and label of the chat templates that were registered last, the newest first."""
    return list(_labels().order_by("-created_at", "sha256")[:limit])


def chat_template_labels(hashes: Iterable[str]) -> list[ChatTemplate]:
    """Hash and label of the chat templates with these hashes."""
    return list(_labels().filter(pk__in=list(hashes)))


def _labels() -> QuerySet[ChatTemplate]:
    return ChatTemplate.objects.only("sha256", "label")
