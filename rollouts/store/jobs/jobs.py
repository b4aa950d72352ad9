"""Jobs: a record describes each kind, the attempt says which worker holds a job, the heartbeat that it lives. Whether
work is under way, and whether its worker is lost, is one rule for jobs, runs and trajectories."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import Error, transaction
from django.db.models import Count, Exists, F, Max, OuterRef, Q, QuerySet
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.store.models import ACTIVE, Job, ParserAudit, Replay, Run, StoredTrajectory, TemplateCheck, WorkStatus
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action, record
from rollouts.store.people.visible_objects import SUBJECTS
from rollouts.store.text import without_paths

JOB_SILENT_SECONDS = 30  # A running job without a heartbeat for this time has lost its worker.
JOB_LOST_SECONDS = 180  # The message of a job that is queued for this time may be lost, because Redis was restarted.
RUN_STALE_SECONDS = 20.0
"""A launched run without a heartbeat for this time has lost its worker, and its leases have run out."""

CLOCK_LEEWAY = timedelta(seconds=10)  # By so much the clocks of machines may differ.


def is_active(work: Any) -> bool:
    """Whether a run, a trajectory, a job or a template check still changes."""
    return work.status in ACTIVE


def is_silent(work: Job | Run) -> bool:
    """Whether a job or a launched run is active and has lost its worker or its message."""
    if isinstance(work, Job):
        last, running, queued = work.heartbeat_at, float(JOB_SILENT_SECONDS), float(JOB_LOST_SECONDS)
    else:
        started = work.started_at if work.status == WorkStatus.RUNNING else None
        last, running, queued = work.heartbeat_at or started or work.created_at, RUN_STALE_SECONDS, RUN_STALE_SECONDS
    allowed = {WorkStatus.RUNNING.value: running, WorkStatus.QUEUED.value: queued}.get(work.status)
    return allowed is not None and (timezone.now() - last).total_seconds() > allowed


def take_back_heartbeats(work: QuerySet[Any]) -> None:
    """A heartbeat from the future becomes one of now: the clock was set back, and the worker may have been lost since.
    A worker that lives writes its next one within seconds."""
    now = timezone.now()
    work.filter(status__in=ACTIVE, heartbeat_at__gt=now + CLOCK_LEEWAY).update(heartbeat_at=now)


TELL_SECONDS = 0.5  # How often progress is written at most.
SEND_AGAIN_SECONDS = 45
"""A job that is queued for so long is sent again, because a restart of Redis may have lost its message."""
Subject = Run | Replay | TemplateCheck | ParserAudit
_COLUMNS = {Run: "run", Replay: "replay", TemplateCheck: "template_check", ParserAudit: "parser_audit"}
MAX_JOBS = 10
FOLLOWED_AFTER = timedelta(seconds=30)  # After this time a worker that lives has asked for what follows a job.


class JobLost(Exception):
    """The job is no longer ours: it was cancelled, taken over by another worker, or deleted."""


def refuse_opened(run: Run) -> None:
    """Raises :class:`Refusal` for a run whose files are shown where they lie: not all of its tokens are stored."""
    if "opened" in run.settings:
        raise Refusal(
            "These files are read where they lie, and only what is looked at is here. Import them first, and do this "
            "in the run that they become."
        )


def ask_job(
    subject: Subject, kind: str, options: Mapping[str, Any] | None = None, user: Any = None
) -> tuple[Job, bool]:
    """The job of a kind for its subject, and whether a worker has to be sent for it.

    A job that is under way is returned as it is. A job whose worker is lost continues if the same kind and options are
    asked for; else it fails and a new job begins. Raises :class:`Refusal` for a run whose files are read in place,
    ``KeyError`` for a kind that is not registered.
    """
    if isinstance(subject, Run):
        refuse_opened(subject)
    activity = JOB_KINDS[kind].activity
    job, is_new = _ask_job(subject, kind, dict(options or {}), user)
    if is_new and activity:
        settings = "".join(f", {name} {value}" for name, value in job.options.items())
        of = subject.trajectory if isinstance(subject, Replay | ParserAudit) else subject
        record(activity, of, detail=f"job {job.code}{settings}")
    return job, is_new


def _ask_job(subject: Subject, kind: str, wanted: dict[str, Any], user: Any) -> tuple[Job, bool]:
    column = _COLUMNS[type(subject)]
    of_subject = Job.objects.filter(**{column: subject})
    owner = user if user is not None and getattr(user, "is_authenticated", False) else None
    # All others have one job in all, a run one of each kind.
    active = of_subject.filter(Q(kind=kind) if column == "run" else Q(), status__in=ACTIVE)
    with transaction.atomic():
        list(active.select_for_update().order_by("pk"))  # before the subject, as every worker of the job does
        type(subject).objects.select_for_update().get(pk=subject.pk)  # two presses at once queue here
        job = active.first()
        if job is not None and not is_silent(job):
            return job, False
        if job is not None and (job.kind, job.options) == (kind, wanted):
            job.heartbeat_at, job.status, job.cancel_requested = timezone.now(), Job.Status.QUEUED, False
            job.save(update_fields=["heartbeat_at", "status", "cancel_requested"])
            return job, True
        if job is not None:
            close_shards(job)
            job.status, job.error, job.finished_at = Job.Status.FAILED, "Its worker was lost.", timezone.now()
            job.save(update_fields=["status", "error", "finished_at"])
        if column != "run":
            of_subject.delete()
        return Job.objects.create(**{column: subject}, kind=kind, options=wanted, created_by=owner), True


def take_job(pk: int, force: bool = False) -> Job | None:
    """The job for the worker that takes it now; None when another worker has it, or it has ended. ``force``: take it
    from a worker that lives, too; what that worker does afterwards changes nothing."""
    job = Job.objects.filter(pk=pk, status__in=ACTIVE).first()
    if job is None or (job.status == Job.Status.RUNNING and not is_silent(job) and not force):
        return None
    ours = Job.objects.filter(pk=pk, status=job.status, attempt=job.attempt).update(
        status=Job.Status.RUNNING, attempt=F("attempt") + 1, heartbeat_at=timezone.now()
    )
    return Job.objects.get(pk=pk) if ours else None


def touch_job(job: Job) -> None:
    """Say that the worker lives; nothing changes when it does not hold the job any more."""
    ours = Job.objects.filter(pk=job.pk, attempt=job.attempt, status=Job.Status.RUNNING)
    ours.update(heartbeat_at=timezone.now())


def beat_job(job: Job, **fields: Any) -> None:
    """Write the heartbeat and the progress of a job. Raises :class:`JobLost` if the work is to stop."""
    ours = Job.objects.filter(pk=job.pk, attempt=job.attempt, status=Job.Status.RUNNING, cancel_requested=False)
    if not ours.update(heartbeat_at=timezone.now(), **fields):
        raise JobLost
    for name, value in fields.items():
        setattr(job, name, value)


class Beat:
    """:func:`beat_job` for one job, as its handler calls it. ``tell`` is called with the job each time."""

    def __init__(self, job: Job, tell: Callable[[Job], object] = lambda _: None) -> None:
        self.job, self._tell, self._last = job, tell, time.monotonic()

    def __call__(self, **fields: Any) -> None:
        self._last = time.monotonic()
        beat_job(self.job, **fields)
        self._tell(self.job)

    def now_and_then(self, **fields: Any) -> None:
        """The same, unless the last call was a moment ago."""
        if time.monotonic() - self._last >= TELL_SECONDS:
            self(**fields)


def end_job(job: Job, status: str, error: str = "", held: Collection[str] = ACTIVE, **fields: Any) -> bool:
    """End a job. Returns False, and changes nothing, if it has ended or another worker holds it. ``held``: the states
    in which it is ended; a job that was queued again waits for another worker. Its shards go. Those of an import that
    failed stay for *Resume*."""
    ours = Job.objects.filter(pk=job.pk, attempt=job.attempt, status__in=held)
    if not ours.update(status=status, error=without_paths(error), finished_at=timezone.now(), **fields):
        return False
    if kind_of(job).sharing is not None and job.whole_id is None:
        close_shards(job)
        if (job.kind, status) != ("import", Job.Status.FAILED):
            job.shards.all().delete()
    return True


def close_shards(job: Job) -> None:
    """End the shards of a job that have not ended. What their workers do afterwards changes nothing. It waits for a
    worker that is storing something in this moment."""
    job.shards.filter(status__in=ACTIVE).update(
        status=Job.Status.CANCELLED, attempt=F("attempt") + 1, finished_at=timezone.now()
    )


def note_outage(job: Job, sentence: str) -> None:
    """Say why the work broke off. The job stays as it is: a worker takes it up when it has been silent for a while."""
    with suppress(Error):  # the database may be what failed
        Job.objects.filter(pk=job.pk, attempt=job.attempt, status=Job.Status.RUNNING).update(
            error=without_paths(sentence)
        )


def cancel_job(job: Job) -> None:
    """Ask a job to stop. A job without a worker ends at once; a worker sees the flag at its next :class:`Beat`."""
    with transaction.atomic():
        locked = Job.objects.select_for_update().get(pk=job.pk)
        if stops := locked.status in ACTIVE:
            locked.cancel_requested = True
            parted = locked.shards.filter(status__in=ACTIVE).exists()
            if parted:
                close_shards(locked)
                locked.shards.all().delete()
            if locked.status == Job.Status.QUEUED or is_silent(locked) or parted:
                locked.status, locked.finished_at = Job.Status.CANCELLED, timezone.now()
            locked.save(update_fields=["cancel_requested", "status", "finished_at"])
    job.refresh_from_db()
    if stops:
        record(Action.CANCELLED, job)


def adopt_jobs() -> list[Job]:
    """Returns jobs that have lost their worker or their message, as they were. Only one caller gets each job. A job
    whose shards are under way has no worker of its own. It lives as long as somebody calls this."""
    take_back_heartbeats(Job.objects.all())
    now = timezone.now()
    open_shards = Job.objects.filter(whole=OuterRef("pk"), status__in=ACTIVE)
    Job.objects.filter(Exists(open_shards), status=Job.Status.RUNNING).update(heartbeat_at=now)
    old = Q(status=Job.Status.QUEUED, heartbeat_at__lt=now - timedelta(seconds=SEND_AGAIN_SECONDS))
    running = Q(status=Job.Status.RUNNING)
    lost = [job for job in Job.objects.filter(old | running).order_by("pk") if is_silent(job) or job.status == "queued"]
    # The caller that changes the heartbeat has the job.
    unchanged = (Job.objects.filter(pk=job.pk, status=job.status, heartbeat_at=job.heartbeat_at) for job in lost)
    return [job for job, same in zip(lost, unchanged, strict=True) if same.update(heartbeat_at=now, status="queued")]


def return_job(job: Job) -> None:
    """A job of :func:`adopt_jobs` could not be sent: the next look finds it again."""
    Job.objects.filter(pk=job.pk, status=Job.Status.QUEUED, attempt=job.attempt).update(
        status=job.status, heartbeat_at=job.heartbeat_at
    )


def files_in_use() -> set[str]:
    """Codes of the exports whose files are still offered, or are being written."""
    alive = Q(status__in=ACTIVE) | Q(status=Job.Status.DONE, expires_at__gt=timezone.now())
    return set(Job.objects.filter(alive, kind="export").values_list("code", flat=True))


# -- kinds -------------------------------------------------------------------------------------------------------------


class Sharing(NamedTuple):
    """How a large job of a kind is shared out among workers."""

    cut: Callable[[Job, Beat], Sequence[Mapping[str, Any]]]
    """The options of each part, in order; empty = the job is small, and its handler does it in one."""
    do: Callable[[Job, Beat], Mapping[str, Any]]
    """Does a shard, from the start or from where an earlier worker stopped. Returns columns to store at its end."""
    join: Callable[[Job, Beat], None]
    """Puts together what the shards made, and ends the job. It may run again where an earlier worker was lost."""


@dataclass(frozen=True)
class JobKind:
    """Everything about a kind of job. The record stands beside the work, and ``rollouts.jobs.job_kinds`` lists it."""

    slug: str  # What ``Job.kind`` stores; at most 20 characters.
    title: str  # What pages and the API call it.
    handler: Callable[[Job, Beat], None]
    """Does a job from where an earlier worker stopped. It ends the job as done, if possible in the transaction of its
    last result. It raises :class:`Refusal`, or :class:`JobLost`."""
    sharing: Sharing | None = None  # How large jobs are shared out among workers; None = one worker does a job.
    fail: Callable[[Job, str, str], object] = lambda job, sentence, remedy: end_job(
        job, Job.Status.FAILED, sentence, remedy=remedy
    )
    """Ends a job that could not be done, with a sentence and a remedy, and whatever else ends with it."""
    follow: Callable[[Run, Any], None] | None = None
    """What is asked for the run when a job is done, in the name of the user who asked for the job."""
    of_engine: bool = False
    """Only a worker of the model that ``options`` names does it. Workers of the queue ``default`` leave it."""
    activity: str = ""
    """What the audit log says when a user asks for a job; at most 40 characters, stored. Empty = nothing."""
    done: Callable[[Job], str] | None = None
    """The sentence for a job that is done; None = the page of a run does not list jobs of this kind."""
    cancelled: str = "Cancelled after {done}; nothing is shown of it."
    """Of a listed kind: the sentence for a job that was cancelled; ``{done}`` is how far it came."""
    details: Callable[[Mapping[str, Any]], str] = lambda options: ""  # The options in words, as they follow the title.
    page: str = "run#work"  # Name of the address of the page of its result, and the place on it.


JOB_KINDS: dict[str, JobKind] = {}  # Slug -> kind. ``rollouts.jobs.job_kinds`` fills it when Django starts.


def kind_of(job: Job) -> JobKind:
    """The kind of a job. A job of another version may have a kind that this one does not know: such a job fails."""
    return JOB_KINDS.get(job.kind) or JobKind(job.kind, job.kind, _refuse)


def _refuse(job: Job, beat: Beat) -> None:
    raise Refusal(f"This version of the product does no jobs of the kind {job.kind}.")


def engine_kinds() -> list[str]:
    """The slugs of the kinds that only workers of a model do."""
    return [slug for slug, kind in JOB_KINDS.items() if kind.of_engine]


def unfollowed_jobs() -> list[Job]:
    """One job of each run that is done, and was perhaps killed before it asked for what follows. One query."""
    kinds, now = [slug for slug, kind in JOB_KINDS.items() if kind.follow], timezone.now()
    later = Job.objects.filter(run=OuterRef("run"), kind="gap", pk__gt=OuterRef("pk"))
    recent = Job.objects.filter(finished_at__range=(now - 20 * FOLLOWED_AFTER, now - FOLLOWED_AFTER))
    done = recent.filter(~Exists(later), status=Job.Status.DONE, kind__in=kinds, whole=None).exclude(run=None)
    return list({job.run_id: job for job in done.select_related("run", "created_by").order_by("pk")}.values())


def latest_jobs(run: Run, *kinds: str) -> list[Job]:
    """The newest jobs of a run, the newest first, each with its owner, without diagnoses of pushes that are done. A
    list of several kinds does without their reports, which may be large."""
    is_silent_success = Q(kind="diagnose_pushed", status=Job.Status.DONE)
    jobs = run.jobs.filter(~is_silent_success, kind__in=kinds).select_related("created_by").order_by("-pk")
    return list((jobs.defer("report") if len(kinds) > 1 else jobs)[:MAX_JOBS])


def diagnosed_at(trajectory: StoredTrajectory) -> datetime | None:
    """When the findings of a trajectory were made: with its rows, or by a later job. None = it was not diagnosed."""
    if trajectory.checks is None:
        return None
    stored_at = trajectory.finished_at or trajectory.created_at
    again = trajectory.run.jobs.filter(kind__in=("diagnose", "diagnose_pushed"), status=Job.Status.DONE)
    last = again.aggregate(last=Max("finished_at"))["last"]
    return max(stored_at, last) if last else stored_at


def find_job(run_code: str, code: str, *kinds: str) -> Job | None:
    """A job of a run by both codes, of one of the kinds, with its run."""
    return Job.objects.select_related("run").filter(run__code=run_code, code=code, kind__in=kinds).first()


def waiting_jobs(access: Access) -> dict[str, int]:
    """Kind -> the number of jobs that may be seen and wait for a worker."""
    queued = Job.objects.filter(status=Job.Status.QUEUED)
    waiting = access.limit(queued, *SUBJECTS).values_list("kind")
    return dict(waiting.annotate(n=Count("pk")).order_by("kind"))


def active_jobs(run: Run, *kinds: str) -> list[Job]:
    """The jobs of a run that are under way, of these kinds or of any, the oldest first. One query."""
    active = run.jobs.filter(status__in=ACTIVE).order_by("pk")
    return list(active.filter(kind__in=kinds) if kinds else active)


def job_codes(run: Run, kind: str) -> list[str]:
    """The codes of the jobs of a kind that a run has. One query."""
    return list(run.jobs.filter(kind=kind).values_list("code", flat=True))


def delete_ended_jobs(run: Run, kind: str) -> None:
    """Delete the jobs of a kind that a run has and that are not under way."""
    run.jobs.filter(kind=kind).exclude(status__in=ACTIVE).delete()


def delete_earlier_jobs(job: Job, option: str) -> None:
    """Delete the older jobs of the same kind and run, of those that have the option or of those that lack it."""
    earlier = Job.objects.filter(run=job.run_id, kind=job.kind, pk__lt=job.pk)
    has_option = Q(options__has_key=option)
    earlier.filter(has_option if option in job.options else ~has_option).delete()


def old_jobs(age: timedelta) -> QuerySet[Job]:
    """The jobs of runs that ended so long ago, without a file, and with a later job of their kind in the run."""
    now = timezone.now()
    later = Job.objects.filter(run=OuterRef("run"), kind=OuterRef("kind"), pk__gt=OuterRef("pk"))
    ended = Job.objects.filter(~Q(status__in=ACTIVE), Exists(later), finished_at__lt=now - age)
    return ended.filter(Q(expires_at=None) | Q(expires_at__lt=now))


def drop_earlier_reports(job: Job) -> None:
    """Drop the reports of the older jobs of the same kind and run."""
    Job.objects.filter(run=job.run_id, kind=job.kind, pk__lt=job.pk).update(report=None)
