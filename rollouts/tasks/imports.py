"""Imports in the background."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import shared_task
from django.utils import timezone

from rollouts import services
from rollouts.models import Run

log = logging.getLogger(__name__)

SILENT_SECONDS = 15
"""A running import that has not moved for so long has lost its worker."""


@shared_task(name="rollouts.import_files", bind=True, max_retries=3)
def import_files(self: Any, run_id: int) -> None:
    """Read the files that the run's settings name. Delivered twice it imports once; after a crash it goes on."""
    from rollouts.work.diagnosis import findings_for

    run = Run.objects.select_related("tokenizer__chat_template", "chat_template").filter(pk=run_id).first()
    if run is None or run.status not in (Run.Status.QUEUED, Run.Status.RUNNING):
        return
    if (
        run.status == Run.Status.RUNNING
        and run.heartbeat_at
        and (run.heartbeat_at > timezone.now() - timedelta(seconds=SILENT_SECONDS))
    ):
        if self.request.retries < self.max_retries:
            # Another worker may be at it, or may have died a moment ago: its heartbeat will tell.
            raise self.retry(countdown=SILENT_SECONDS)
        return
    files = [Path(path) for path in run.settings.get("files", [])]
    try:
        services.import_files(
            run,
            files,
            run.settings.get("format") or "auto",
            diagnose=findings_for,
            use_recorded_tokenizer=bool(run.settings.get("use_recorded_tokenizer", True)),
        )
    except Exception:
        log.exception("import broke off run=%s", run.code)  # the run says so itself
