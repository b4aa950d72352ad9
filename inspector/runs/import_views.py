"""`/import`: upload files of trajectories; a worker reads them, and the run's page shows how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.uploaded_tokenizer import register_upload
from inspector.runs.pages import RunValues
from inspector.web.forms import NO_TOKENIZER, ImportForm
from inspector.web.twins import json_page, page, wants_json
from rollouts import services
from rollouts.models import Run, Tokenizer
from rollouts.work import imports
from rollouts.work.sending import send


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def new(request: HttpRequest) -> HttpResponse:
    """The upload form. A POST that is right goes on to the run's page, where the import shows its progress."""
    form = ImportForm(request.POST, request.FILES) if request.method == "POST" else ImportForm()
    status = 200
    if request.method == "POST":
        run = _start(form, request)
        if run is not None:
            return json_page(RunValues.of(run), 201) if wants_json(request) else redirect("run", run.code)
        status = 422
    data: dict[str, Any] = {"upload_max_bytes": settings.UPLOAD_MAX_BYTES}
    data["tokenizers"] = [name for _, name in form.registered]
    if status == 422:
        data["errors"] = form.sentences()
    return page(request, "imports/new.html", data, status, form=form)


def _start(form: ImportForm, request: HttpRequest) -> Run | None:
    """The import that a form asks for; None with the form's errors filled in when it cannot be."""
    if not form.is_valid():
        return None
    given = form.cleaned_data
    tokenizer: Tokenizer | None = None
    if given["tokenizer_file"]:
        tokenizer = register_upload(form, "tokenizer_file", given["tokenizer_file"])
    elif given["tokenizer"] not in ("", NO_TOKENIZER):
        tokenizer = Tokenizer.objects.filter(pk=given["tokenizer"].removeprefix("id:")).first()
    if form.errors:
        return None
    template = services.register_chat_template(given["chat_template"]) if given["chat_template"] else None
    names = [Path(file.name or "").name for file in given["files"]]
    run = services.create_run(
        Run.Kind.IMPORT,
        given["name"].strip() or names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        user=request.user,
        tokenizer=tokenizer,
        chat_template=template or (tokenizer.chat_template if tokenizer else None),
    )
    kept = imports.keep_files(given["files"], settings.INSPECTOR_DATA / "uploads" / run.code)
    run.bytes_total = sum(path.stat().st_size for path in kept)
    run.save(update_fields=["bytes_total"])
    job = imports.ask(run, kept, given["format"], given["tokenizer"] == "" and tokenizer is None)
    if sentence := send(job):
        sentence += " Or use manage.py import_rollouts, which needs no worker."
        services.end_run(run, Run.Status.FAILED, f"The import could not be sent to a worker. {sentence}")
    return run
