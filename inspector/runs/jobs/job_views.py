"""What can be done to a run that has ended: diagnose it again, export it, replay strategies over it."""

import tempfile
import threading
from typing import IO, Any
from urllib.parse import urlencode

from django.http import FileResponse, Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.urls import reverse
from django.views.decorators.http import require_safe

from inspector.runs.filters import ListQuery
from inspector.runs.jobs.ask_for_job import STILL_WORKS, ask_for_job, tell
from inspector.runs.jobs.job_values import JobValues, listed_kinds
from inspector.web.access import found_or_404, reader_of, reads_run, writes_run
from inspector.web.remedies import WORDS
from inspector.web.twins import error_page, json_page, wants_json, whole_number
from rollout_inspector.refusal import Refusal, worded
from rollouts.jobs import diagnosis
from rollouts.jobs.broker import send_job
from rollouts.jobs.exports import exports
from rollouts.jobs.exports.exports import ExportOptions, is_offered
from rollouts.jobs.replays import run_replays
from rollouts.store import files
from rollouts.store.chat_templates.tokenizers import tokenizer_named
from rollouts.store.jobs import jobs
from rollouts.store.jobs.jobs import ask_job, find_job, is_active, kind_of, refuse_opened
from rollouts.store.models import Job, Run
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from rollouts.store.runs.imports import has_partial_file
from rollouts.store.runs.runs import choose_tokenizer
from rollouts.store.trajectory_filters import filter_trajectories

MAX_TOKENS_IN_REQUEST = 500_000  # The most tokens of a run that a request exports. A worker exports a larger run.
MAX_TRAJECTORIES = 2_000
IN_MEMORY = 8 << 20
MAX_EXPORTS = 4
"""How many files this process writes at once in requests. More of them would take the processor from all pages."""
_places = threading.BoundedSemaphore(MAX_EXPORTS)


@writes_run
def diagnose(request: HttpRequest, run: Run) -> HttpResponse:
    """Take the tokenizer that is named, if any, and send a worker to diagnose every finished trajectory again."""
    name = request.POST.get("tokenizer", "").replace("\0", "")
    tokenizer = tokenizer_named(run.project_id, name) if name else None
    if is_active(run):
        return _told(request, run, "This run still works. It is diagnosed as it goes; wait, or cancel it first.", 409)
    if name and tokenizer is None:
        return _told(request, run, f"There is no tokenizer “{name[:80]}”. Register it first.", 422)
    job, send = ask_job(
        run, diagnosis.KIND.slug, {"tokenizer": tokenizer.name} if tokenizer is not None else {}, request.user
    )
    if not send:
        return _told(request, run, f"This run is being diagnosed already: {_so_far(job)}. Nothing was begun.", 200, job)
    if tokenizer is not None and tokenizer.pk != run.tokenizer_id:
        choose_tokenizer(run, tokenizer)
    if sentence := send_job(job):
        return _told(request, run, sentence, 503)
    return _told(request, run, "A worker diagnoses this run again; its progress stands below.", 202, job)


def _so_far(job: Job) -> str:
    return f"{job.n_done:,} of {job.n_total:,} trajectories are done" if job.n_total else "it waits for a worker"


def _told(request: HttpRequest, run: Run, sentence: str, status: int, job: Job | None = None) -> HttpResponse:
    return tell(request, run, sentence, status, f"{reverse('run', args=[run.code])}#work", job)


def wanted_of(params: QueryDict, reader: int | None) -> ExportOptions:
    """The export that a form or an address asks for: with `which=list`, of what passes the filter of the list.
    ``reader``: the key of the user who asks; None = a visitor. Raises :class:`Refusal`."""
    numbers = {}
    for name in ("pad_to", "pad_id"):
        text = params.get(name, "").strip()
        numbers[name] = whole_number(text)
        if text and numbers[name] is None:
            raise Refusal(f"“{text[:40]}” is no whole number; {name} takes one, such as 4096.")
    if (numbers["pad_to"] or 0) > exports.MAX_PADDING:
        raise Refusal(f"Rows are padded to at most {exports.MAX_PADDING:,} tokens; pad_to asks for more.")
    return ExportOptions(
        format=params.get("format", "") or "own_jsonl", strategy=params.get("strategy", ""),
        force=bool(params.get("force")) or params.get("faulty") == "force",
        leave_out=bool(params.get("leave_out")) or params.get("faulty") == "leave_out",
        skip_discontinuous=bool(params.get("skip_discontinuous")), pad_to=numbers["pad_to"],
        pad_id=numbers["pad_id"] or 0, only=_only(params, reader) if params.get("which") == "list" else None,
    )


def _only(params: QueryDict, reader: int | None) -> dict[str, Any] | None:
    query = ListQuery.read(params, reader)
    if query.notices:
        raise Refusal(query.notices[0])
    return query.chosen() or None


def _address(run: Run, wanted: ExportOptions, params: QueryDict, reader: int | None) -> str:
    """The address of the file that a request writes."""
    query = {name: value for name, value in wanted.as_options().items() if name != "only"}
    if wanted.only:
        query |= {"which": "list", **dict(ListQuery.read(params, reader).pairs())}
    return f"{reverse('run-export', args=[run.code])}?{urlencode(query)}"


def fits_a_request(run: Run, wanted: ExportOptions) -> bool:
    """Whether the export is written while the browser waits. A worker replays the rows of another strategy, because
    that takes longer. A worker also leaves trajectories out, because its job names them, which a downloaded file cannot
    do."""
    return (
        not wanted.strategy
        and not wanted.leave_out
        and not wanted.skip_discontinuous
        and max(run.n_tokens, run.n_rows * (wanted.pad_to or 0)) <= MAX_TOKENS_IN_REQUEST
        and run.n_trajectories <= MAX_TRAJECTORIES
    )


@reads_run
def export(request: HttpRequest, run: Run) -> Any:
    """The finished trajectories as a file. A row that the format cannot take is refused with its finding."""
    try:
        refuse_opened(run)
        options = wanted_of(request.GET, reader_of(request))
    except ValueError as error:
        return error_page(request, 422, "This cannot be written", str(error), run.code)
    if has_partial_file(run):
        sentence = "A file of this run is being read, and only a part of it is stored. Wait until the import has ended."
        return error_page(request, 409, "This run is being imported", sentence, run.code)
    if not fits_a_request(run, options):
        return error_page(
            request, 413, "Only a worker writes this",
            "An export that is large, replays a strategy or leaves trajectories out is written by a worker. Log in and "
            "press Export on the page of the run. "
            f"On the server: manage.py export_rollouts {run.code} --format {options.format} --output FILE",
            run.code,
        )
    if not _places.acquire(blocking=False):
        sentence = f"{MAX_EXPORTS} other exports are being written at this moment. Ask again in some seconds."
        busy = error_page(request, 503, "The server is busy", sentence, run.code)
        busy["Retry-After"] = "5"
        return busy
    # The whole file first, because a refusal must come before the first byte is sent.
    file: IO[Any] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - the answer closes it
    try:
        exports.write_run(run, filter_trajectories(run, options.filters), options, file)
    except Refusal as refusal:
        file.close()
        sentence = worded(str(refusal), refusal.remedy, WORDS)
        return error_page(request, 422, "This run cannot be written in that format", sentence, run.code)
    finally:
        _places.release()
    file.seek(0)
    activity_log.record(Action.DOWNLOADED, run, detail=options.format)
    return FileResponse(file, as_attachment=True, filename=file_name(run, options))


def file_name(run: Run, wanted: ExportOptions) -> str:
    strategy = f"_{wanted.strategy}" if wanted.strategy else ""
    part = "_part" if wanted.only else ""
    return f"run_{run.code}_{wanted.format}{strategy}{part}{exports.suffix_of(wanted.format)}"


@writes_run
def begin_export(request: HttpRequest, run: Run) -> HttpResponse:
    """What a request may write is downloaded at once; a worker writes the rest to a file that the page then offers."""
    try:
        options = wanted_of(request.POST, reader_of(request))
    except ValueError as error:
        return error_page(request, 422, "This cannot be written", str(error), run.code)
    if is_active(run):
        return _told(request, run, STILL_WORKS, 409)
    if fits_a_request(run, options) and not wants_json(request):
        return redirect(_address(run, options, request.POST, reader_of(request)))
    job, send = ask_job(run, exports.KIND.slug, options.as_options(), request.user)
    if not send:
        sentence = f"An export of this run is being written: {_so_far(job)}. Wait for it, or cancel it first."
        return _told(request, run, sentence, 200 if job.options == options.as_options() else 409, job)
    if sentence := send_job(job):
        return _told(request, run, sentence, 503)
    return _told(request, run, "A worker writes the file; its progress, and then the file, stand below.", 202, job)


@writes_run
def replay(request: HttpRequest, run: Run) -> HttpResponse:
    """Send a worker to replay every strategy over the finished trajectories of a run."""
    back = f"{reverse('run-cost', args=[run.code])}#strategies"
    return ask_for_job(request, run, run_replays.KIND.slug, {}, back, STILL_WORKS if is_active(run) else "")


@writes_run
def cancel_job(request: HttpRequest, run: Run, job: str) -> HttpResponse:
    """Ask a job to stop; one that has ended stays as it is."""
    stored_job = found_or_404(find_job(run.code, job, *listed_kinds()), "job", job)
    jobs.cancel_job(stored_job)
    name, mark, place = kind_of(stored_job).page.partition("#")
    address = f"{reverse(name, args=[run.code])}{mark}{place}"
    return json_page(JobValues.of(stored_job, run)) if wants_json(request) else redirect(address)


@require_safe
@reads_run
def job_file(request: HttpRequest, run: Run, job: str) -> Any:
    """The file of an export, until it expires."""
    stored_job = find_job(run.code, job, exports.KIND.slug)
    if stored_job is None:
        raise Http404(f"This run has no export with the code {job}.")
    sentence = "The export has expired, or was never finished. Go to the page of the run and export it again."
    return offered_file(stored_job, run) or error_page(request, 410, "This file is not offered", sentence, run.code)


def offered_file(job: Job, run: Run) -> FileResponse | None:
    """The file of an export as an answer; None when it is not offered, or gone."""
    if not is_offered(job):
        return None
    try:
        file = files.open_file(exports.key_of(job))
    except FileNotFoundError:
        return None
    activity_log.record(Action.DOWNLOADED, run, detail=f"job {job.code}")
    return FileResponse(file, as_attachment=True, filename=file_name(run, ExportOptions(**job.options)))
