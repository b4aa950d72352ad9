"""Files that nobody needs any more, because a process was killed before it could remove them."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path

from django.core.cache import cache
from django.utils import timezone

from rollouts.jobs.exports import exports
from rollouts.jobs.imports import imports
from rollouts.jobs.imports.uploads import drop_uploads, kept_codes
from rollouts.jobs.storage import retention, token_moves
from rollouts.jobs.storage.retention import fault_of_clock
from rollouts.store import files, storage_mark
from rollouts.store.jobs.jobs import is_active, old_jobs
from rollouts.store.models import Run
from rollouts.store.people.accounts import drop_expired_sessions
from rollouts.store.people.activity_log import drop_old_events
from rollouts.store.runs.imports import never_sent_imports
from rollouts.store.runs.runs import end_active_run, find_run
from rollouts.store.trajectories.token_segments import delete_orphans, delete_replaced

log = logging.getLogger(__name__)

UPLOAD_AGE = timedelta(days=7)  # How long the uploads of an import that broke off are kept for *Resume*.
JOB_AGE = timedelta(days=90)  # How long a job that has ended is kept where its run has had a later one of its kind.
LIST_SECONDS = 24 * 3600  # How often the segments of the file storage are listed.
UPLOAD_SECONDS = 24 * 3600.0  # No request takes so long. An older file belongs to a process that is gone.


def sweep() -> None:
    """Remove what is old, unless the clock may be wrong; then gather segments.

    Uploads that no import reads again, files of exports that are not offered, and drafts of dead writers are removed.
    Imports that were never sent are ended, and runs that keep their arrays in segments are gathered. Lines of the audit
    log, sessions and jobs that are too old go. Files of another database stay as they are. Raises
    :class:`rollouts.store.files.StorageDown`.
    """
    if fault := fault_of_clock(note=True):
        log.warning("%s", fault)
    else:
        _remove_old()
    token_moves.gather()


def _remove_old() -> None:
    drop_old_events()
    drop_expired_sessions()
    old_jobs(JOB_AGE).delete()
    retention.sweep()
    for run in never_sent_imports(timezone.now() - timedelta(seconds=UPLOAD_SECONDS)):
        end_active_run(run, Run.Status.FAILED, "The upload did not come to its end. Import the files again.")
    for path in chain(files.left_drafts(), _old_children(files.scratch_folder())):
        log.info("leftover removed name=%s", path.name)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if fault := storage_mark.fault():
        log.error("leftovers in the file storage stay: %s", fault)
    else:
        _sweep_storage()


def _sweep_storage() -> None:
    exports.drop_files()
    _sweep_segments()
    for code in kept_codes():
        if not _is_read(code):
            log.info("uploads removed run=%s", code)
            drop_uploads(code)


def _sweep_segments() -> None:
    """Remove segments that were replaced, and once a day those that no row names: that lists all of them."""
    now = timezone.now()
    delete_replaced(now)
    if cache.add("segments-listed", 1, timeout=LIST_SECONDS):
        delete_orphans(now)


def _is_read(code: str) -> bool:
    """Whether an import will read the uploads of the run with this code."""
    run = find_run(code=code)
    if run is None or is_active(run):
        return run is not None
    ended = run.finished_at or run.created_at
    return timezone.now() - ended < UPLOAD_AGE and imports.left_of(run) is not None


def _old_children(folder: Path) -> Iterator[Path]:
    """Folders, and files without a lock, which nobody has changed for a day."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.suffix != ".part" and time.time() - path.stat().st_mtime > UPLOAD_SECONDS:
                yield path
