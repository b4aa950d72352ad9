"""Writing the trajectories of a launch: leases, steps as they are sampled, the end of each; all idempotent."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import timedelta

from django.db import connection, transaction
from django.db.models import F, Q
from django.utils import timezone

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import JSON, Ids, Step
from rollouts.store import models
from rollouts.store.bulk import change_whole
from rollouts.store.text import without_paths
from rollouts.store.trajectories.contents import Contents
from rollouts.store.trajectories.findings import add_findings, set_findings, worst_severity
from rollouts.store.trajectories.previews import stored_preview
from rollouts.store.trajectories.save_trajectories import bump_run, reward_totals
from rollouts.store.trajectories.step_writer import StepWriter, count_tokens
from rollouts.store.trajectories.token_encoding import stored_steps

Status = models.StoredTrajectory.Status


def add_queued_trajectories(
    run: models.Run, new: Sequence[tuple[models.StoredTrajectory, JSON]], extra: JSON = None
) -> list[models.StoredTrajectory]:
    """Queue new trajectories of a launch, each with its task; the run expects that many more. A task is any JSON value:
    what the environment needs to begin. ``extra`` is kept with each trajectory."""
    with transaction.atomic():
        contents = Contents()
        first = run.trajectories.count()
        for index, (record, task) in enumerate(new, first):
            record.run, record.index, record.status = run, index, Status.QUEUED
            record.task_id = None if task is None else contents.add(task)
            record.extra_id = contents.add_unless_empty(extra)
        contents.save()
        created = models.StoredTrajectory.objects.bulk_create(record for record, _ in new)
        models.Run.objects.filter(pk=run.pk).update(
            n_expected=F("n_expected") + len(new), n_trajectories=F("n_trajectories") + len(new)
        )
    run.refresh_from_db(fields=["n_expected", "n_trajectories"])
    return created


def lease_trajectories(run: models.Run, n: int, seconds: float) -> list[models.StoredTrajectory]:
    """Take up to ``n`` queued trajectories, or running ones whose worker has gone silent, for so many seconds. Each
    comes back with its ``attempt``, which later calls must name. No two workers get the same one."""
    now = timezone.now()
    free = Q(status=Status.QUEUED) | Q(status=Status.RUNNING, lease_until__lt=now)
    until = now + timedelta(seconds=seconds)
    with transaction.atomic():
        # Where rows are locked one by one another worker skips them; SQLite lets one writer in at a time.
        skips = connection.features.has_select_for_update_skip_locked
        candidates = run.trajectories.select_for_update(of=("self",), skip_locked=skips).filter(free)
        leased = list(candidates.select_related("task").order_by("index")[:n])
        models.StoredTrajectory.objects.filter(pk__in=[record.pk for record in leased]).update(
            attempt=F("attempt") + 1, lease_until=until, status=Status.RUNNING, error=""
        )
    for record in leased:
        record.attempt += 1
        record.lease_until, record.status, record.error = until, Status.RUNNING, ""
    return leased


def renew_lease(records: Sequence[models.StoredTrajectory], seconds: float) -> set[int]:
    """Renew leases. Returns the keys of the trajectories that are still leased by this worker."""
    until = timezone.now() + timedelta(seconds=seconds)
    leased: set[int] = set()
    by_attempt: dict[int, list[int]] = {}
    for record in records:
        by_attempt.setdefault(record.attempt, []).append(record.pk)
    with transaction.atomic():
        for attempt, keys in by_attempt.items():
            ours = models.StoredTrajectory.objects.filter(pk__in=keys, attempt=attempt, status=Status.RUNNING)
            ours.update(lease_until=until)
            leased.update(ours.values_list("pk", flat=True))
    return leased


def release_trajectories(records: Sequence[models.StoredTrajectory]) -> None:
    """Put leased trajectories back into the queue, with the steps they have."""
    for record in records:
        models.StoredTrajectory.objects.filter(pk=record.pk, attempt=record.attempt, status=Status.RUNNING).update(
            status=Status.QUEUED, lease_until=None
        )


def save_steps(new: Sequence[tuple[int, int, Step]], prefix: Ids | None = None) -> None:
    """Steps of several trajectories, as (trajectory key, step index, step), in one transaction. ``prefix``: of the fork
    that all of them belong to. Raises ``ValueError`` when a step would leave a gap before it."""
    if not new:
        return
    with transaction.atomic():
        steps = stored_steps({key for key, _, _ in new})
        runs = dict(models.StoredTrajectory.objects.filter(pk__in=steps).values_list("pk", "run_id"))
        writer = StepWriter(len(new))
        added: dict[int, list[models.StoredStep]] = {}
        for key, index, step in sorted(new, key=lambda one: one[:2]):
            if key not in runs or index < len(steps[key].keys):
                continue  # the run was deleted meanwhile, or the step is stored
            if index > len(steps[key].keys):
                raise ValueError(f"step {index} cannot be stored before step {len(steps[key].keys)}")
            steps[key].prefix = prefix
            added.setdefault(key, []).append(writer.add_step(key, steps[key], step))
        writer.save()
        per_run: dict[int, Counter[str]] = defaultdict(Counter)
        per_trajectory, lines = [], []
        for key, stored in sorted(added.items()):
            n_sampled, n_tokens = count_tokens(stored)
            per_trajectory.append((len(stored), n_tokens, n_sampled, key))
            lines.append((*stored_preview(steps[key].steps), key))
            per_run[runs[key]] += Counter(n_steps=len(stored), n_tokens=n_tokens, n_sampled=n_sampled)
        change_whole(models.StoredTrajectory, ("n_steps", "n_tokens", "n_sampled"), per_trajectory, add=True)
        change_whole(models.StoredTrajectory, ("prompt_line", "answer_line"), lines)
        for run_key, totals in sorted(per_run.items()):
            models.Run.objects.filter(pk=run_key).update(
                heartbeat_at=timezone.now(), **{name: F(name) + n for name, n in totals.items()}
            )


def finish_trajectories(ends: Sequence[TrajectoryEnd]) -> set[int]:
    """Store the ends of many launched trajectories in one transaction. Returns the keys of those that ended now. One
    whose attempt no longer holds it, or that has ended already, stays as it is."""
    if not ends:
        return set()
    with transaction.atomic():
        locked = models.StoredTrajectory.objects.select_for_update(of=("self",)).select_related("run")
        records = locked.filter(pk__in=[end.key for end in ends], status=Status.RUNNING).order_by("pk").in_bulk()
        ours: dict[int, TrajectoryEnd] = {}
        for end in ends:
            if end.key in records and records[end.key].attempt == end.attempt:
                ours.setdefault(end.key, end)
        values = stored_steps(ours, with_messages=False)
        steps: dict[int, list[models.StoredStep]] = {key: [] for key in ours}
        for step in models.StoredStep.objects.filter(trajectory__in=ours).order_by("trajectory_id", "index"):
            steps[step.trajectory_id].append(step)
        writer = StepWriter(0)
        added: dict[int, Counter[str]] = defaultdict(Counter)
        findings_of_run: dict[int, list[tuple[models.StoredTrajectory, Sequence[Finding]]]] = defaultdict(list)
        for key, end in ours.items():
            record = records[key]
            before = record.n_steps, record.n_tokens, record.n_sampled
            writer.add_rows(record, steps[key], values[key], end.rows)
            if not steps[key]:
                _, record.n_tokens, record.n_sampled = before
            record.status, record.finished_at, record.lease_until = Status.DONE, timezone.now(), None
            record.reward, record.reward_parts, record.stop_reason = end.reward, dict(end.reward_parts), end.stop_reason
            set_findings(record, end.findings)
            record.checks = end.checks
            totals = added[record.run_id]
            totals["n_finished"] += 1
            totals["n_rows"] += record.n_rows
            totals.update(reward_totals([end.reward]))
            for name, old in zip(("n_steps", "n_tokens", "n_sampled"), before, strict=True):
                totals[name] += getattr(record, name) - old
            findings_of_run[record.run_id].append((record, end.findings))
        writer.save()
        ended = [(*(getattr(records[key], name) for name in _ENDED), key) for key in ours]
        change_whole(models.StoredTrajectory, _ENDED, ended)
        for run_key, findings in findings_of_run.items():
            run = findings[0][0].run
            bump_run(run, add_findings(run, findings), **added[run_key])
    return set(ours)


_ENDED = (
    "status", "finished_at", "lease_until", "reward", "reward_parts", "stop_reason", "n_findings", "worst_severity",
    "n_steps", "n_rows", "n_trained", "n_tokens", "n_sampled", "n_lost", "checks",
)
"""The columns that the end of a trajectory changes."""


def fail_trajectory(end: TrajectoryEnd) -> bool:
    """End a launched trajectory with an error; its steps stay. False when this attempt no longer holds it."""
    with transaction.atomic():
        leased = models.StoredTrajectory.objects.filter(pk=end.key, attempt=end.attempt, status=Status.RUNNING)
        lost = leased.update(
            status=Status.FAILED, error=without_paths(end.error), finished_at=timezone.now(), lease_until=None,
            n_findings=len(end.findings), worst_severity=worst_severity(finding.severity for finding in end.findings),
        )
        if lost:
            record = models.StoredTrajectory.objects.select_related("run").get(pk=end.key)
            bump_run(record.run, add_findings(record.run, [(record, end.findings)]), n_failed=1)
    return bool(lost)


def cancel_remaining(run: models.Run) -> int:
    """Cancel every trajectory that is not finished. Returns how many there were."""
    return run.trajectories.filter(status__in=models.ACTIVE).update(
        status=Status.CANCELLED, finished_at=timezone.now(), lease_until=None, attempt=F("attempt") + 1
    )


def resume_run(run: models.Run) -> int:
    """Queue again what a launch has not finished. Stored steps are kept. Returns the number of trajectories to make.
    For a run that failed, was cancelled or is silent. What still works on it loses its leases. Raises :class:`Refusal`
    where there is nothing to go on with."""
    with transaction.atomic():
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        if locked.kind != models.Run.Kind.LAUNCH:
            raise Refusal("Only a launched run can be resumed; an import is begun again from its files.")
        unfinished = locked.trajectories.exclude(status=Status.DONE)
        failed = unfinished.filter(status=Status.FAILED)
        kinds: Counter[str] = Counter(
            models.StoredFinding.objects.filter(trajectory__in=failed).order_by().values_list("kind", flat=True)
        )
        models.StoredFinding.objects.filter(trajectory__in=failed).delete()
        n_failed = failed.count()
        n = unfinished.update(
            status=Status.QUEUED, error="", finished_at=None, lease_until=None, attempt=F("attempt") + 1,
            n_findings=0, worst_severity="",
        )
        if not n:
            raise Refusal("Every trajectory of this run is done, so there is nothing to resume.")
        # The clock goes on where it stopped: a pause is not part of the run's pace.
        stopped = locked.finished_at or locked.heartbeat_at
        paused = timezone.now() - stopped if locked.started_at and stopped else timedelta()
        models.Run.objects.filter(pk=locked.pk).update(
            status=models.Run.Status.QUEUED, error="", finished_at=None, heartbeat_at=None, cancel_requested=False,
            n_failed=F("n_failed") - n_failed, started_at=F("started_at") + paused,
        )
        bump_run(locked, {kind: -count for kind, count in kinds.items()})
    run.refresh_from_db()
    return n
