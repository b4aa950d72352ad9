"""`/import`: upload files of trajectories. A worker reads them, and the page of the run shows its progress."""

from pathlib import Path

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.uploaded_tokenizer import register_upload
from inspector.runs.jobs.ask_for_job import tell
from inspector.runs.launches.launch_form import NewRunPage
from inspector.runs.run_values import RunValues
from inspector.web.access import chosen_project, writes_run
from inspector.web.forms import ImportForm
from inspector.web.twins import json_page, page, wants_json
from rollouts.jobs import opened
from rollouts.jobs.imports import imports
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import Project, Run
from rollouts.store.runs.runs import create_run


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def new(request: HttpRequest) -> HttpResponse:
    """The upload form. A valid POST goes on to the page of the run, which shows the progress of the import."""
    where = chosen_project(request)
    form = ImportForm(where.chosen, *([request.POST, request.FILES] if request.method == "POST" else []))
    run = start_import(form, request, where.chosen) if request.method == "POST" else None
    if run is not None:
        return json_page(RunValues.of(run), 201) if wants_json(request) else redirect("run", run.code)
    names = [tokenizer.name for tokenizer in form.registered.values()]
    data = NewRunPage(where.chosen.code, form.sentences(), tokenizers=names, upload_max_bytes=settings.UPLOAD_MAX_BYTES)
    return page(request, "imports/new.html", data, 422 if form.errors else 200, form=form, where=where)


@writes_run
def begin_opened(request: HttpRequest, run: Run, what: str) -> HttpResponse:
    """Check all files that this server shows where they lie, or import them into the user's own server."""
    return tell(request, run, opened.begin(run, what), 202, reverse("run", args=[run.code]))


def start_import(form: ImportForm, request: HttpRequest, project: Project) -> Run | None:
    """Start the import that a form asks for. Returns None, and fills in the form's errors, when it cannot start."""
    if not form.is_valid():
        return None
    cleaned = form.cleaned_data
    tokenizer = form.registered.get(cleaned["tokenizer"])
    if cleaned["tokenizer_file"]:
        tokenizer = register_upload(form, "tokenizer_file", cleaned["tokenizer_file"], project)
    if form.errors:
        return None
    text = cleaned["chat_template"]
    template = register_chat_template(text, project=project) if text else None
    names = [Path(file.name or "").name for file in cleaned["files"]]
    run = create_run(
        Run.Kind.IMPORT,
        cleaned["name"].strip() or names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        user=request.user, project=project, tokenizer=tokenizer,
        chat_template=template or (tokenizer.chat_template if tokenizer else None),
    )
    use_recorded = cleaned["tokenizer"] == "" and tokenizer is None
    job = imports.ask_for_uploads(run, cleaned["files"], cleaned["format"], use_recorded, cleaned["rule"])
    imports.send_import(run, job)
    return run
