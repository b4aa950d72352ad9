"""Answers a POST that asks a worker for a job of a run and then shows the page of its result."""

from collections.abc import Mapping
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from inspector.runs.jobs.job_values import JobValues
from inspector.web.twins import json_page, told, wants_json
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Run

STILL_WORKS = "This run still works. Wait until it has ended, or cancel it first."


def ask_for_job(
    request: HttpRequest, run: Run, kind: str, options: Mapping[str, Any], back: str, refused: str = "",
    status: int = 409,
) -> HttpResponse:
    """Send a worker, and lead ``back`` to the page of the result; to a program 202 with the job. ``refused``: a
    sentence that says why no job begins, and ``status`` its status; empty = one begins. A job of the kind that is under
    way is the answer as it is."""
    job = None
    if not refused:
        job, is_new = ask_job(run, kind, options, request.user)
        refused, status = (send_job(job) if is_new else ""), 503
    if refused or job is None:
        return told(request, refused, back, twin={"run": run.code, "error": refused}, status=status)
    twin = {"run": run.code, "job": JobValues.of(job, run)}
    return json_page(twin, 202) if wants_json(request) else redirect(back)


def tell(request: HttpRequest, run: Run, sentence: str, status: int, back: str, job: Job | None = None) -> HttpResponse:
    """Say what came of a wish, on the page ``back``; to a program with the status, and with the job where one began."""
    twin: dict[str, Any] = {"run": run.code, "message" if status < 400 else "error": sentence}
    twin |= {"job": JobValues.of(job, run)} if job is not None else {}
    return told(request, sentence, back, twin=twin, status=status)
