"""`/tokenizers`: the registered ones, and the form that registers one more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.uploaded_tokenizer import keep_upload, scratch_folder, unreadable, with_template
from inspector.web.forms import TokenizerForm
from inspector.web.twins import json_page, page, wants_json
from rollouts import services, tokenizers
from rollouts.models import Tokenizer
from rollouts.selectors.registered import list_tokenizers


def tokenizer_values(tokenizer: Tokenizer) -> dict[str, Any]:
    """A registered tokenizer as its line and its JSON show it."""
    return {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "source": tokenizer.source,
        "revision": tokenizer.revision,
        "vocab_size": tokenizer.vocab_size,
        "encoder": tokenizer.encoder,
        "chat_template": tokenizer.chat_template_id,
        "created_at": tokenizer.created_at,
    }


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list, and the form under it."""
    form = TokenizerForm(request.POST, request.FILES) if request.method == "POST" else TokenizerForm()
    status = 200
    if request.method == "POST":
        registered = _register(form)
        if registered is not None:
            if wants_json(request):
                return json_page(tokenizer_values(registered), 201)
            messages.success(
                request, f"The tokenizer “{registered.name}” is registered: {registered.vocab_size:,} tokens."
            )
            return redirect("tokenizers")
        status = 422
    data: dict[str, Any] = {"tokenizers": [tokenizer_values(one) for one in list_tokenizers()]}
    if status == 422:
        data["errors"] = form.sentences()
    return page(request, "tokenizers/index.html", data, status, form=form, hub=settings.HUB_ALLOWED)


def _register(form: TokenizerForm) -> Tokenizer | None:
    """The tokenizer that a form registers; None with the form's errors filled in when it cannot be."""
    if not form.is_valid():
        return None
    given = form.cleaned_data
    try:
        with scratch_folder() as scratch:
            folder, source, name = _folder_of(given, scratch)
            if given.get("chat_template"):
                folder = with_template(folder, given["chat_template"], scratch)
            wanted = given["name"].strip() or name
            return services.register_tokenizer(folder, wanted, source=source, revision=given.get("revision") or "")
    except (ValueError, OSError) as error:
        form.add_error(None, unreadable(error))
        return None


def _folder_of(given: dict[str, Any], scratch: Path) -> tuple[Path, str, str | None]:
    """The folder that a form names, how its source is written down, and a name when the folder's own says nothing."""
    if given["folder"]:
        return Path(given["folder"]), given["folder"], None
    if given["upload"]:
        return keep_upload(given["upload"], scratch), f"upload of {given['upload'].name}", None
    cache, hub_id = settings.INSPECTOR_DATA / "hub", given["hub_id"]
    folder = tokenizers.from_hub(hub_id, given["revision"], cache, settings.HUB_ALLOWED)
    return folder, hub_id, hub_id.rpartition("/")[2]
