"""Cancel, resume and delete a run, whatever state it is in and whether or not its worker lives."""

from rollouts.jobs import launch
from rollouts.jobs.broker import DO_JOB, send_task
from rollouts.jobs.exports.exports import drop_files_of
from rollouts.jobs.imports import import_join, imports
from rollouts.jobs.imports.uploads import drop_uploads
from rollouts.store.database import reload
from rollouts.store.files import StorageDown
from rollouts.store.jobs.jobs import active_jobs, close_shards, is_active, is_silent, job_codes, take_job
from rollouts.store.jobs.shards import is_cut, stop_shards
from rollouts.store.models import Job, Run
from rollouts.store.people.activity_log import Action, record
from rollouts.store.runs.runs import cancel_run, delete_run, end_active_run
from rollouts.store.trajectories.launched_trajectories import cancel_remaining


def cancel(run: Run) -> None:
    """Ask a run to stop. It ends at once where no worker is at it; a worker sees the flag within seconds."""
    if is_active(run):
        record(Action.CANCELLED, run)
    cancel_run(run)
    if (job := _import_of(run)) is not None:
        if not is_silent(job) and (stopped := stop_shards(job)) is not None:
            send_task(DO_JOB, stopped.pk)  # its worker puts complete files together; the clock sends it, too
        elif not (is_cut(job) and not is_silent(job)) and (taken_job := take_job(job.pk)) is not None:
            import_join.cancel(taken_job)
    reload(run)


def can_resume(run: Run) -> bool:
    """Whether there is something to go on with, and no worker is at it."""
    if run.kind == Run.Kind.LAUNCH:
        return launch.can_resume(run)
    try:
        return imports.left_of(run) is not None
    except StorageDown:  # the page of the run is shown all the same
        return False


def resume(run: Run) -> None:
    """Go on with a run that stopped before its end. Raises :class:`Refusal`."""
    if run.kind == Run.Kind.LAUNCH:
        launch.resume(run)
    else:
        imports.resume(run)
    record(Action.RESUMED, run)


def delete(run: Run, why: str = "") -> None:
    """Remove a run with its uploads and the files of its exports. What still works on it stores nothing more. ``why``:
    a reason for the audit log."""
    cancel_run(run)
    if is_active(run) and _import_of(run) is None:  # a worker samples it, or a recorder writes it
        cancel_remaining(run)
        end_active_run(run, Run.Status.CANCELLED)
    for job in active_jobs(run):
        take_job(job.pk, force=True)
        close_shards(job)
    exports = job_codes(run, "export")
    delete_run(run)
    record(Action.DELETED, run, detail=why)
    drop_uploads(run.code)
    drop_files_of(exports)


def _import_of(run: Run) -> Job | None:
    """The job that reads files into a run, while it is under way."""
    return next(iter(active_jobs(run, "import")), None)
