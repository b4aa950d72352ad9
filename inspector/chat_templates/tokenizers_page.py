"""`/tokenizers`: the registered tokenizers, and the form that registers another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.uploaded_tokenizer import keep_upload, unreadable, with_template
from inspector.web.access import access, chosen_project, form_project, project_name, projects_to_filter
from inspector.web.forms import TokenizerForm
from inspector.web.twins import Page, from_columns, json_page, page, wants_json
from rollout_inspector.text import tokenizers
from rollouts.store import files
from rollouts.store.chat_templates.tokenizers import list_tokenizers, register_tokenizer
from rollouts.store.models import Project, Tokenizer
from rollouts.store.outages import disk_fault


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list, `?project=` filters it, and for a member the form under it."""
    where = chosen_project(request) if request.method == "POST" else form_project(request)
    form = TokenizerForm(*([request.POST, request.FILES] if request.method == "POST" else []))
    registered = _register(form, where.chosen) if request.method == "POST" and where is not None else None
    if registered is None:
        project_code = request.GET.get("project", "")[:64]
        listed = list_tokenizers(access(request), project_code)
        tokenizers_page = {
            "tokenizers": [_line(request, tokenizer) for tokenizer in listed], "errors": form.sentences(),
        }
        only_html: dict[str, Any] = {
            "form": form if where is not None else None, "where": where, "hub": settings.HUB_ALLOWED,
        }
        only_html |= {"projects": projects_to_filter(request), "asked": project_code}
        return page(request, "tokenizers/index.html", tokenizers_page, 422 if form.errors else 200, **only_html)
    if wants_json(request):
        return json_page(_line(request, registered), 201)
    messages.success(request, f"The tokenizer “{registered.name}” is registered: {registered.vocab_size:,} tokens.")
    return redirect("tokenizers")


def _line(request: HttpRequest, tokenizer: Tokenizer) -> TokenizerValues:
    return TokenizerValues.of(tokenizer, project_name(request, tokenizer.project_id))


def _register(form: TokenizerForm, project: Project) -> Tokenizer | None:
    """Register what a form names in a project. Returns None, and fills in the form's errors, on failure."""
    if not form.is_valid():
        return None
    cleaned = form.cleaned_data
    try:
        with TemporaryDirectory(dir=files.scratch_folder()) as scratch_name:
            folder, source, name = _folder_of(cleaned, scratch := Path(scratch_name))
            if cleaned.get("chat_template"):
                folder = with_template(folder, cleaned["chat_template"], scratch)
            tokenizer_name = cleaned["name"].strip() or name
            revision = cleaned.get("revision") or ""
            return register_tokenizer(folder, tokenizer_name, source, revision, project)
    except (ValueError, OSError) as error:
        if disk_fault(error):
            raise
        form.add_error(None, unreadable(error))
        return None


def _folder_of(cleaned: dict[str, Any], scratch: Path) -> tuple[Path, str, str | None]:
    """The folder that a form names, its source in words, and a name when the name of the folder means nothing."""
    if folder_text := cleaned.get("folder"):
        roots, data = settings.TOKENIZER_FOLDERS, settings.INSPECTOR_DATA
        folder = tokenizers.copy_from_server(folder_text, roots, kept_out=data, target=scratch / "named")
        return folder, Path(folder_text).name, None
    if cleaned["upload"]:
        return keep_upload(cleaned["upload"], scratch), f"upload of {cleaned['upload'].name}", None
    cache, hub_id = settings.INSPECTOR_DATA / "hub", cleaned["hub_id"]
    folder = tokenizers.from_hub(hub_id, cleaned["revision"], cache, settings.HUB_ALLOWED)
    return folder, hub_id, hub_id.rpartition("/")[2]


@dataclass(frozen=True)
class TokenizerValues(Page):
    """A registered tokenizer; in the matrix with the check of its chat template."""

    name: str
    """Names it on forms and in files; unique in its project."""
    project: str | None
    """Name of its project, for a user who sees several."""
    project_code: str
    """Code of its project."""
    sha256: str
    """Of its tokenizer.json."""
    source: str
    """Where it came from: name of the folder, upload, or hub id."""
    revision: str
    """Of a hub id."""
    vocab_size: int
    """Tokens that it has."""
    encoder: str
    """Which library encodes with it exactly."""
    chat_template: str | None
    """Hash of the template that it came with."""
    created_at: datetime
    """When it was registered."""
    code: str | None = None
    """In the matrix: code of the check; null where nobody has asked."""
    status: str = ""
    """In the matrix: status of the check, or ``missing``."""
    error: str = ""
    """In the matrix: why the check failed."""
    prefix_preserving: bool | None = None
    """In the matrix: as of the check."""
    cells: dict[str, str] = field(default_factory=dict)
    """In the matrix: probe -> one of ``template_matrix.WORDS``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, project: str | None, **check: Any) -> Self:
        """A tokenizer whose project is loaded, and what the matrix shows of its check."""
        return from_columns(
            cls, tokenizer, project=project, project_code=tokenizer.project.code,
            **{"chat_template": tokenizer.chat_template_id} | check,
        )
