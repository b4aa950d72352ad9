"""Registered chat templates. A run and a check use those of their own project alone."""

import hashlib
from collections.abc import Iterable

from django.core.cache import caches

from rollout_inspector.refusal import Refusal
from rollout_inspector.text.chat_templates import is_renderer, kept_text
from rollout_inspector.text.processes import Faults
from rollouts.store import models
from rollouts.store.models import ChatTemplate, Project, ProjectTemplate
from rollouts.store.people.access import Access
from rollouts.store.people.members import key_of


def register_chat_template(text: str, label: str = "", project: models.Project | None = None) -> models.ChatTemplate:
    """Keep a chat template under the hash of its bytes, and the name that a project has for it. One that the project
    knows keeps its name unless it had none. ``renderer:NAME`` is named by itself. ``project``: None = the default one.
    Raises :class:`Refusal` for a text that cannot be kept, and for a renderer that is not installed."""
    if "\0" in text:
        raise Refusal("A chat template cannot hold the character U+0000.")
    text = kept_text(text)
    label = text if is_renderer(text) else label
    key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
    template, _ = models.ChatTemplate.objects.get_or_create(sha256=key, defaults={"text": text})
    name, created = models.ProjectTemplate.objects.get_or_create(
        project_id=key_of(project), chat_template=template, defaults={"label": label[:200]}
    )
    if label and not created and not name.label:
        name.label = label[:200]
        name.save(update_fields=["label"])
    return template


def find_chat_template(project: Project | int | None, sha256: str) -> ChatTemplate | None:
    """The chat template with that hash, if it is registered in the project."""
    return ChatTemplate.objects.filter(pk=sha256, names__project=project).first()


def faults_in(run: int, text: str) -> Faults:
    """How often renders of a chat template had to be ended in a run; all workers count together."""
    return Faults(caches["counts"], f"template:{run}:{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()}")


def project_with_template(access: Access, sha256: str) -> Project | None:
    """The first project by name that may be seen and has registered the chat template with that hash."""
    registered = ProjectTemplate.objects.filter(chat_template=sha256).values("project")
    return access.limit(Project.objects.filter(pk__in=registered), "pk").order_by("name").first()


def chat_template_texts(project: Project | int | None, keys: Iterable[str]) -> dict[str, str]:
    """Texts of the chat templates of a project by their sha256. A template that only others registered is left out."""
    templates = ChatTemplate.objects.filter(sha256__in=list(keys), names__project=project)
    return dict(templates.values_list("sha256", "text"))


def newest_chat_templates(project: Project | int | None, limit: int) -> list[ProjectTemplate]:
    """Hash and name of the chat templates that a project registered last, the newest first."""
    return list(ProjectTemplate.objects.filter(project=project).order_by("-created_at", "-pk")[:limit])


def chat_template_labels(project: Project | int | None, hashes: Iterable[str]) -> dict[str, str]:
    """Hash -> the project's label, of the chat templates with these hashes that the project registered."""
    templates = ProjectTemplate.objects.filter(project=project, chat_template__in=list(hashes))
    return dict(templates.values_list("chat_template", "label"))
