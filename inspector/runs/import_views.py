"""`/import`: upload files of trajectories; a worker reads them, and the run's page shows how far it is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.files.uploadedfile import TemporaryUploadedFile, UploadedFile
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from inspector.chat_templates.uploaded_tokenizer import register_upload, tidy_name
from inspector.runs.pages import RunValues
from inspector.web.forms import NO_TOKENIZER, ImportForm
from inspector.web.twins import json_page, page, wants_json
from rollouts import services
from rollouts.models import Run, Tokenizer


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
    kept = keep_files(given["files"], settings.INSPECTOR_DATA / "uploads" / run.code)
    run.settings = {
        "files": [str(path) for path in kept],
        "format": given["format"],
        "use_recorded_tokenizer": given["tokenizer"] == "" and tokenizer is None,
    }
    run.bytes_total = sum(path.stat().st_size for path in kept)
    run.save(update_fields=["settings", "bytes_total"])
    send(run)
    return run


def keep_files(files: Sequence[UploadedFile], folder: Path) -> list[Path]:
    """Move uploads into `folder` under names that are theirs, made safe; a second file of a name gets a number."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept: list[Path] = []
    for file in files:
        target = folder / tidy_file(file.name or "")
        number = 2
        while target.exists():
            target = folder / f"{number}-{tidy_file(file.name or '')}"
            number += 1
        if isinstance(file, TemporaryUploadedFile):
            shutil.move(file.temporary_file_path(), target)
        else:
            with target.open("wb") as out:
                for chunk in file.chunks():
                    out.write(chunk)
        kept.append(target)
    return kept


def tidy_file(name: str) -> str:
    """A file's name with its suffixes, and nothing that a path could stumble over."""
    plain = Path(name.replace("\\", "/")).name
    suffixes = "".join(Path(plain).suffixes[-3:])[:40] if plain else ""
    stem = plain.removesuffix(suffixes) if suffixes else plain
    return tidy_name(stem) + "".join(letter for letter in suffixes if letter.isalnum() or letter in "._-")


def send(run: Run) -> None:
    """Order the work; a broker that does not answer fails the run with a sentence."""
    from rollouts.tasks.imports import import_files

    try:
        import_files.apply_async((run.pk,))
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        sentence = (
            f"The import could not be sent to a worker: Redis does not answer ({type(error).__name__}). Start it "
            "(make run starts an embedded one) and import again, or use manage.py import_rollouts, which needs none."
        )
        services.end_run(run, Run.Status.FAILED, sentence)
