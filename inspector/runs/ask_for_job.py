"""Answers a POST that asks a worker for a job of a run and then shows the page of its result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect

from inspector.runs.jobs import JobLine
from inspector.web.twins import json_page, wants_json
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run

STILL_WORKS = "This run still works. Wait until it has ended, or cancel it first."


def ask_for_job(
    request: HttpRequest, run: Run, kind: str, options: Mapping[str, Any], back: str, refused: str = "",
    status: int = 409,
) -> HttpResponse:
    """Send a worker, and lead ``back`` to the page of the result; to a program 202 with the job.

    ``refused``: a sentence that says why no job begins, and ``status`` its status; empty = one begins. A job of
    the kind that is under way is the answer as it is.
    """
    job = None
    if not refused:
        job, is_new = ask_job(run, kind, options, request.user)
        refused, status = (send_job(job) if is_new else ""), 503
    if wants_json(request):
        told = {"error": refused} if refused or job is None else {"job": JobLine.of(job, run)}
        return json_page({"run": run.code, **told}, status if refused else 202)
    if refused:
        messages.error(request, refused, extra_tags="error")
    return redirect(back)
