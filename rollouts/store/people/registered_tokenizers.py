"""Registered tokenizers and chat templates. Each function is one query.

A run and a check use tokenizers and chat templates of their own project alone, so most functions ask in one project.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import QuerySet

from rollouts.store.models import ChatTemplate, Project, ProjectTemplate, Tokenizer
from rollouts.store.people.access import Access


def list_tokenizers(access: Access, project_code: str = "") -> QuerySet[Tokenizer]:
    """The tokenizers that may be seen, by name, each with its project; with a code only those of that project."""
    found = access.limit(Tokenizer.objects.order_by("name", "pk")).select_related("project")
    return found.filter(project__code=project_code) if project_code else found


def tokenizers_of(project: Project | int | None) -> QuerySet[Tokenizer]:
    """The tokenizers of a project by name. The query runs when the result is read, so a form can use it as choices."""
    return Tokenizer.objects.filter(project=project).order_by("name")


def tokenizer_names(project: Project | int | None, limit: int | None = None) -> list[str]:
    """The names of the first ``limit`` tokenizers of a project; None = of all."""
    return list(tokenizers_of(project).values_list("name", flat=True)[:limit])


def tokenizer_named(project: Project | int | None, name: str) -> Tokenizer | None:
    """The tokenizer of that name in a project, with its chat template."""
    return tokenizers_of(project).select_related("chat_template").filter(name=name).first()


def registered_from(source: str, project: Project | int | None = None) -> Tokenizer | None:
    """The tokenizer that was registered last from a source; with a project the last one there."""
    found = Tokenizer.objects.filter(source=source) if project is None else tokenizers_of(project).filter(source=source)
    return found.order_by("-pk").first()


def tokenizers_with_template(found: QuerySet[Tokenizer], texts: bool = False) -> list[Tokenizer]:
    """Those of ``found`` that have their own chat template. ``texts``: also load the templates."""
    found = found.exclude(chat_template=None)
    return list(found.select_related("chat_template") if texts else found)


def find_chat_template(project: Project | int | None, sha256: str) -> ChatTemplate | None:
    """The chat template with that hash, if it is registered in the project."""
    return ChatTemplate.objects.filter(pk=sha256, names__project=project).first()


def project_with_template(access: Access, sha256: str) -> Project | None:
    """The first project by name that may be seen and has registered the chat template with that hash."""
    found = ProjectTemplate.objects.filter(chat_template=sha256).values("project")
    return access.limit(Project.objects.filter(pk__in=found), "pk").order_by("name").first()


def chat_template_texts(project: Project | int | None, keys: Iterable[str]) -> dict[str, str]:
    """Texts of the chat templates of a project by their sha256. A template that only others registered is left out."""
    found = ChatTemplate.objects.filter(sha256__in=list(keys), names__project=project)
    return dict(found.values_list("sha256", "text"))


def newest_chat_templates(project: Project | int | None, limit: int) -> list[ProjectTemplate]:
    """Hash and name of the chat templates that a project registered last, the newest first."""
    return list(ProjectTemplate.objects.filter(project=project).order_by("-created_at", "-pk")[:limit])


def chat_template_labels(project: Project | int | None, hashes: Iterable[str]) -> dict[str, str]:
    """Hash -> the project's label, of the chat templates with these hashes that the project registered."""
    found = ProjectTemplate.objects.filter(project=project, chat_template__in=list(hashes))
    return dict(found.values_list("chat_template", "label"))
