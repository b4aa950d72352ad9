"""What can be done to a run that has ended: judged anew, and written in a trainer's format."""

from __future__ import annotations

import logging
import tempfile
from typing import IO, Any

from django.contrib import messages
from django.http import FileResponse, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST, require_safe

from inspector.access import reads_run
from inspector.api import error_page, json_page, wants_json
from inspector.run_data import is_active
from rollouts import exporting
from rollouts.formats.exports import ExportRefused
from rollouts.models import Run, Tokenizer
from rollouts.tasks import diagnose_run

log = logging.getLogger(__name__)

LARGEST = 20_000_000
"""Tokens of a run that a request writes; a larger one is written on the command line."""
IN_MEMORY = 8 << 20


@require_POST
def diagnose(request: HttpRequest, code: str) -> HttpResponse:
    """Choose another tokenizer where one is named, and send a worker to judge every finished trajectory anew."""
    run = get_object_or_404(Run, code=code)
    named = request.POST.get("tokenizer", "").replace("\0", "")
    tokenizer = Tokenizer.objects.filter(name=named).first() if named else None
    if is_active(run):
        return _told(request, run, "This run still works. It is judged as it goes; wait, or cancel it first.", 409)
    if named and tokenizer is None:
        return _told(request, run, f"There is no tokenizer “{named[:80]}”. Register it first.", 422)
    if tokenizer is not None and tokenizer.pk != run.tokenizer_id:
        run.tokenizer = tokenizer
        run.chat_template_id = run.chat_template_id or tokenizer.chat_template_id
        run.save(update_fields=["tokenizer", "chat_template"])
    try:
        diagnose_run.delay(run.pk)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        log.warning("run %s cannot be judged again: %s", run.code, error)
        return _told(request, run, "Redis does not answer, so no worker can be sent. Start it, then try again.", 503)
    return _told(
        request, run, "A worker judges this run anew; its findings change as it goes. Load the page again to see.", 202
    )


def _told(request: HttpRequest, run: Run, sentence: str, status: int) -> HttpResponse:
    if wants_json(request):
        return json_page({"run": run.code, "message" if status < 400 else "error": sentence}, status)
    if status < 400:
        messages.success(request, sentence)
    else:
        messages.error(request, sentence, extra_tags="error")
    return redirect("run", run.code)


@require_safe
@reads_run
def export(request: HttpRequest, run: Run) -> Any:
    """The finished trajectories as a file; a row that the target cannot take is refused with the finding."""
    name = request.GET.get("format", "own_jsonl")
    if name not in exporting.WRITERS:
        known = ", ".join(exporting.WRITERS)
        return error_page(request, 422, "No such format", f"There is no format “{name[:40]}”. Known: {known}.")
    if run.n_tokens > LARGEST:
        return error_page(
            request, 413, "Too large for a page",
            f"This run holds {run.n_tokens:,} tokens; a page writes up to {LARGEST:,}. On the server, run: "
            f"manage.py export_rollouts {run.code} --format {name} --output FILE",
        )  # fmt: skip
    # Whole or not at all: a refusal must come before the first byte is sent.
    file: IO[Any] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the answer closes it
    left_out: list[str] = []
    try:
        exporting.write_run(
            run, run.trajectories.all(), name, file, force=bool(request.GET.get("force")), tell=left_out.append
        )
    except ExportRefused as refusal:
        file.close()
        sentence = str(refusal).replace("with --force", "by ticking “write faulty rows too”")
        return error_page(request, 422, "This run cannot be written in that format", sentence)
    file.seek(0)
    return FileResponse(file, as_attachment=True, filename=f"run_{run.code}_{name}{exporting.suffix_of(name)}")
