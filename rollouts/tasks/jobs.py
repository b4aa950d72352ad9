"""Jobs in the background: a run judged anew, written to a file, or replayed under every strategy; with progress,
cancel, and another worker's help."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from celery import shared_task, signals
from django.conf import settings
from django.db import connection

from rollouts import services
from rollouts.formats.writers.exports import ExportRefused
from rollouts.models import Job, Run, StoredTrajectory
from rollouts.services.jobs import JobLost, adopt_jobs, beat_job, end_job, files_in_use, in_days, take_job
from rollouts.work import exporting, replays
from rollouts.work.diagnosis import diagnose_run

log = logging.getLogger(__name__)

FILE_DAYS = 7
"""How long the file of an export is offered."""
BEAT_SECONDS = 0.5
MAX_NOTES = 50


@shared_task(name="rollouts.do_job")
def do_job(job_id: int) -> None:
    """Do a job, or go on with one whose worker is lost. Delivered twice it is done once."""
    if (job := take_job(job_id)) is not None:
        work_on(job)


def work_on(job: Job, tell: Callable[[Job], object] = lambda _: None) -> None:
    """The task's body, for a job that was taken; ``tell`` hears of each sign of life."""
    works = {Job.Kind.DIAGNOSE: _diagnose, Job.Kind.EXPORT: _export, Job.Kind.REPLAY: _replay}
    work = works[Job.Kind(job.kind)]
    run = Run.objects.select_related("tokenizer__chat_template", "chat_template").get(pk=job.run_id)
    try:
        work(job, run, tell)
    except JobLost:
        end_job(job, Job.Status.CANCELLED)  # when another worker has it, this changes nothing
    except ExportRefused as refusal:
        end_job(job, Job.Status.FAILED, str(refusal))
    except Exception as error:
        log.exception("job broke off job=%s kind=%s run=%s", job.code, job.kind, run.code)
        end_job(job, Job.Status.FAILED, f"It broke off: {type(error).__name__}: {error}"[:2000])


def _diagnose(job: Job, run: Run, tell: Callable[[Job], object]) -> None:
    finished = run.trajectories.filter(status=StoredTrajectory.Status.DONE)
    n_done = finished.filter(index__lte=job.reached).count()
    beat_job(job, n_done=n_done, n_total=finished.count())
    tell(job)
    for batch in diagnose_run(run, job.reached):
        n_done += len(batch)
        beat_job(job, n_done=n_done, reached=batch[-1].index)
        tell(job)
    services.note_diagnosed(run)
    services.take_figures(run)
    end_job(job, Job.Status.DONE)


def _replay(job: Job, run: Run, tell: Callable[[Job], object]) -> None:
    """Replay every strategy over the run; a report that an earlier worker left is gone on with."""
    if job.report is None or job.report["key"] != replays.run_key(run):
        job.report, job.reached = replays.new_report(run), -1
    finished = replays.finished(run)
    n_done = finished.filter(index__lte=job.reached).count()
    beat_job(job, n_done=n_done, n_total=finished.count(), report=job.report, reached=job.reached)
    tell(job)
    last = time.monotonic()
    with closing(replays.replay_run(run, job.report, job.reached)) as made:
        for index in made:
            n_done += 1
            if time.monotonic() - last >= BEAT_SECONDS:
                last = time.monotonic()
                beat_job(job, n_done=n_done, report=job.report, reached=index)
                tell(job)
    end_job(job, Job.Status.DONE, report=job.report, n_done=n_done)


class _Progress:
    """Counts trajectories, and says so now and then."""

    def __init__(self, job: Job, tell: Callable[[Job], object]) -> None:
        self.job, self.tell, self.n_done, self.last = job, tell, 0, time.monotonic()

    def __call__(self) -> None:
        self.n_done += 1
        if time.monotonic() - self.last >= BEAT_SECONDS:
            self.last = time.monotonic()
            beat_job(self.job, n_done=self.n_done)
            self.tell(self.job)


def _export(job: Job, run: Run, tell: Callable[[Job], object]) -> None:
    drop_files()
    wanted = exporting.Wanted(**job.options)
    total = run.trajectories.filter(status=StoredTrajectory.Status.DONE).count()
    beat_job(job, n_done=0, n_total=total, notes=[])
    notes: list[str] = []
    draft = exports_folder() / f"{job.code}.{job.attempt}.part"
    try:
        with draft.open("wb") as file:
            written = exporting.write_run(
                run, run.trajectories.all(), wanted, file, tell=notes.append, tick=_Progress(job, tell)
            )
        size = draft.stat().st_size
        beat_job(job, n_done=total)
        os.replace(draft, file_of(job))
        more = [f"And {len(notes) - MAX_NOTES:,} more."] * (len(notes) > MAX_NOTES)
        end_job(
            job, Job.Status.DONE, n_written=written.n, bytes_written=size,
            notes=[written.left_out, *notes[:MAX_NOTES], *more] if written.left_out else [],
            expires_at=in_days(FILE_DAYS),
        )  # fmt: skip
    finally:
        draft.unlink(missing_ok=True)


def exports_folder() -> Path:
    """Where the files of exports are kept."""
    folder = Path(settings.INSPECTOR_DATA) / "exports"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def file_of(job: Job) -> Path:
    """The file of an export that is done."""
    return exports_folder() / f"{job.code}{exporting.suffix_of(exporting.Wanted(**job.options).format)}"


def drop_files() -> None:
    """Remove the files that nobody is offered any more: expired, or of a run that was deleted."""
    kept = files_in_use()
    for path in exports_folder().iterdir():
        if path.name.partition(".")[0] not in kept:
            path.unlink(missing_ok=True)


def send(job: Job) -> str:
    """Order the work; gives a sentence, and ends the job, when the broker does not answer."""
    try:
        do_job.delay(job.pk)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        log.warning("job %s cannot be sent: %s", job.code, error)
        sentence = "Redis does not answer, so no worker can be sent. Start it (make run starts one), then try again."
        end_job(job, Job.Status.FAILED, sentence)
        return sentence
    return ""


ADOPT_SECONDS = 10.0
_shutting_down = threading.Event()


@signals.worker_ready.connect
def _adopt_in_background(sender: Any, **_: Any) -> None:
    """While a worker of the default queue lives, it sends jobs that lost theirs again."""
    queues = {queue.name for queue in sender.task_consumer.queues} if sender.task_consumer else set()
    if settings.CELERY_TASK_DEFAULT_QUEUE not in queues:
        return

    def watch() -> None:
        while not _shutting_down.wait(ADOPT_SECONDS):
            try:
                for job in adopt_jobs():
                    log.warning("job taken over job=%s kind=%s", job.code, job.kind)
                    do_job.delay(job.pk)
            except Exception:
                log.warning("lost jobs not looked for", exc_info=True)
            finally:
                connection.close()

    threading.Thread(target=watch, name="adopt-jobs", daemon=True).start()


@signals.worker_shutting_down.connect
def _stop_watching(**_: Any) -> None:
    _shutting_down.set()
