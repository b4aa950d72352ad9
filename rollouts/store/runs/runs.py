"""Runs: made, found, named, listed, ended, deleted. No number of queries depends on the number of trajectories."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from rollout_inspector.refusal import Refusal
from rollouts.store import models
from rollouts.store.jobs.jobs import JobLost, is_active, is_silent
from rollouts.store.models import ACTIVE, Job, Project, Run, RunTag, ShareLink, StoredTrajectory, TokenSegment
from rollouts.store.paging import ListPart, cut_part, read_cursor
from rollouts.store.people.access import Access
from rollouts.store.people.activity_log import Action, record
from rollouts.store.people.members import key_of
from rollouts.store.runs import figures
from rollouts.store.runs.forks import keep_prefixes
from rollouts.store.runs.policy_versions import take_policy_versions
from rollouts.store.runs.training_steps import take_training_steps
from rollouts.store.text import storable_text, without_paths
from rollouts.store.trajectories import contents
from rollouts.store.trajectories.launched_trajectories import cancel_remaining
from rollouts.store.trajectories.token_segments import delete_segments_of, delete_unused, segments_of

DELETE_ATTEMPTS = 5


@dataclass(frozen=True)
class RunFilters:
    """Which runs are listed. An empty value, and an unknown status or kind, filters nothing."""

    text: str = ""  # A part of the name or of the model, in upper or lower case, or a whole code.
    status: str = ""
    kind: str = ""
    project: str = ""  # A whole code. A project that is unknown or hidden has no runs.
    tag: str = ""  # A whole tag.


def visible_runs(access: Access, filters: RunFilters, cursor: str, limit: int) -> ListPart[models.Run]:
    """The runs that may be seen and pass, newest first, with their projects. One query. Raises ``ValueError`` for a
    cursor that cannot be read."""
    runs = _filtered(access.limit(models.Run.objects.select_related("project")), filters)
    if last := read_cursor(cursor, "runs", datetime, int):
        at, key = last
        runs = runs.filter(Q(created_at__lt=at) | Q(created_at=at, pk__lt=key))
    items = list(runs.order_by("-created_at", "-id")[: limit + 1])
    return cut_part("runs", items, limit, lambda run: (run.created_at, run.pk))


def runs_with_codes(access: Access, codes: Sequence[str]) -> list[models.Run]:
    """Of these codes the runs that may be seen, with their projects, newest first. One query."""
    runs = access.limit(models.Run.objects.select_related("project")).filter(code__in=list(codes))
    return list(runs.order_by("-created_at", "-id"))


def _filtered(runs: QuerySet[models.Run], filters: RunFilters) -> QuerySet[models.Run]:
    """The runs of ``found`` that pass."""
    if filters.project:
        runs = runs.filter(project__code=filters.project)
    if text := filters.text:
        runs = runs.filter(Q(name__icontains=text) | Q(model__icontains=text) | Q(code=text))
    if filters.tag:
        runs = runs.filter(Exists(models.RunTag.objects.filter(run=OuterRef("pk"), name=filters.tag)))
    if filters.status in models.Run.Status.values:
        runs = runs.filter(status=filters.status)
    if filters.kind in models.Run.Kind.values:
        runs = runs.filter(kind=filters.kind)
    return runs


@dataclass(frozen=True)
class RunTotals:
    """Added up over runs."""

    runs: int
    trajectories: int
    tokens: int
    complete: bool  # False: there are more runs, of which the newest are counted.


def total_runs(access: Access, filters: RunFilters, most: int = 1000) -> RunTotals:
    """Over the runs that may be seen and pass, the newest ``most``. One query."""
    runs = _filtered(access.limit(models.Run.objects.all()), filters).order_by("-created_at", "-id")
    sizes = list(runs.values_list("n_trajectories", "n_tokens")[: most + 1])
    counted = sizes[:most]
    return RunTotals(len(counted), sum(n for n, _ in counted), sum(n for _, n in counted), len(sizes) <= most)


def unfinished_launches(access: Access, limit: int) -> list[models.Run]:
    """Launched runs that may be seen and are queued or running, the oldest first. One query."""
    runs = access.limit(models.Run.objects.all()).filter(status__in=models.ACTIVE, kind=models.Run.Kind.LAUNCH)
    return list(runs.order_by("created_at", "pk")[:limit])


def find_run(templates: bool = False, **columns: Any) -> models.Run | None:
    """The run with these columns; ``templates`` loads its project, tokenizer and chat templates too. One query. Who
    asks for a user decides whether the user may see it (``inspector.web.access``)."""
    runs = models.Run.objects.filter(**columns)
    if templates:
        runs = runs.select_related("project", "tokenizer__chat_template", "chat_template", "rows_chat_template")
    return runs.first()


def get_run(pk: int) -> models.Run:
    """The run with this key, with its tokenizer and chat templates. One query. Raises ``Run.DoesNotExist``."""
    return models.Run.objects.select_related("tokenizer", "chat_template", "rows_chat_template").get(pk=pk)


def count_running(run: models.Run) -> int:
    """Trajectories of a run that a worker is making. One query."""
    return run.trajectories.filter(status=models.StoredTrajectory.Status.RUNNING).count()


def failure_reasons(run: models.Run, limit: int = 1000) -> dict[str, int]:
    """Why trajectories failed -> how many did, of the first ``limit``. One query, or none where none failed."""
    if not run.n_failed:
        return {}
    failed = run.trajectories.filter(status=models.StoredTrajectory.Status.FAILED).order_by("index")
    return dict(Counter(failed.values_list("error", flat=True)[:limit]).most_common())


def create_run(
    kind: str, name: str, user: Any = None, project: models.Project | None = None, **fields: Any
) -> models.Run:
    """A queued run. ``user`` may be anonymous or None. ``project``: None = the default one."""
    owner = user if user is not None and getattr(user, "is_authenticated", False) else None
    fields.setdefault("token_store", settings.INSPECTOR_TOKENS)
    return models.Run.objects.create(kind=kind, name=name[:200], created_by=owner, project_id=key_of(project), **fields)


def start_run(run: models.Run) -> None:
    """The work has begun."""
    now = timezone.now()
    run.status, run.started_at, run.heartbeat_at, run.error = models.Run.Status.RUNNING, run.started_at or now, now, ""
    run.save(update_fields=["status", "started_at", "heartbeat_at", "error"])


def take_figures(run: models.Run) -> None:
    """Count the figures of training steps and policy versions, and what the pages of a large run show. The pages of a
    small run are counted whenever they are looked at."""
    take_training_steps(run)
    take_policy_versions(run)
    now = models.Run.objects.filter(pk=run.pk).first()  # the caller's totals may be of a while ago
    if now is not None and figures.is_large(now):
        models.RunFigures.objects.update_or_create(
            run=now, defaults={"state": figures.state_of(now), "body": figures.count(now)}
        )


def end_run(run: models.Run, status: str, error: str = "") -> None:
    """The work is over, one way or another."""
    run.status, run.error, run.finished_at = status, without_paths(error), timezone.now()
    run.save(update_fields=["status", "error", "finished_at"])
    take_figures(run)


def end_active_run(run: models.Run, status: str, error: str = "") -> None:
    """End a run; nothing changes if it has ended already."""
    active = models.Run.objects.filter(pk=run.pk, status__in=models.ACTIVE)
    if active.update(status=status, error=without_paths(error), finished_at=timezone.now()):
        take_figures(run)


def fail_run(run: models.Run, error: str) -> None:
    """End a launched run with a reason; trajectories that were not made fail for the same reason."""
    failed = run.trajectories.filter(status__in=models.ACTIVE).update(
        status=models.StoredTrajectory.Status.FAILED, error=without_paths(error), finished_at=timezone.now(),
        lease_until=None,
    )
    models.Run.objects.filter(pk=run.pk).update(n_failed=F("n_failed") + failed)
    end_active_run(run, models.Run.Status.FAILED, error)


def reopen_run(run: models.Run) -> None:
    """A run that failed is queued again."""
    run.status, run.error, run.finished_at, run.cancel_requested = models.Run.Status.QUEUED, "", None, False
    run.save(update_fields=["status", "error", "finished_at", "cancel_requested"])


def beat(run: models.Run, **fields: Any) -> bool:
    """Write the heartbeat and the progress of a run. Returns True if somebody asked the run to stop."""
    models.Run.objects.filter(pk=run.pk).update(heartbeat_at=timezone.now(), **fields)
    return is_cancelled(run)


def is_cancelled(run: models.Run) -> bool:
    """Whether somebody asked a run to stop, or deleted it."""
    stops = models.Run.objects.filter(pk=run.pk).values_list("cancel_requested", flat=True).first()
    return stops is None or stops


def cancel_run(run: models.Run) -> None:
    """Ask a run to stop. One that nobody has begun, or whose worker is lost, stops at once. Workers see the flag within
    two seconds. The job of an import ends its run, so here an import is only asked."""
    Status = models.Run.Status
    with transaction.atomic():
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        if is_active(locked):
            locked.cancel_requested = True
            imports = locked.jobs.filter(kind="import", status__in=models.ACTIVE)
            if (locked.status == Status.QUEUED or is_silent(locked)) and not imports.exists():
                locked.status, locked.finished_at = Status.CANCELLED, timezone.now()
                cancel_remaining(locked)
            locked.save(update_fields=["cancel_requested", "status", "finished_at"])
    run.refresh_from_db()


def choose_tokenizer(run: models.Run, tokenizer: models.Tokenizer) -> None:
    """Set the tokenizer of a run, and the tokenizer's chat template if the run has none."""
    run.tokenizer = tokenizer
    run.chat_template_id = run.chat_template_id or tokenizer.chat_template_id
    run.save(update_fields=["tokenizer", "chat_template"])


def delete_run(run: models.Run) -> None:
    """Remove a run and everything that only it refers to."""
    for_run = models.StoredTrajectory.objects.filter(run=run)
    for attempt in range(DELETE_ATTEMPTS):
        try:
            while keys := list(for_run.values_list("pk", flat=True)[:200]):
                delete_trajectories(keys)
            models.Run.objects.get(pk=run.pk).delete()
            delete_segments_of(run.code)
            return
        except models.Run.DoesNotExist:  # somebody else deleted it at the same time
            return
        except IntegrityError:  # a worker stored something in the same moment
            if attempt == DELETE_ATTEMPTS - 1:
                raise
            time.sleep(0.5)


def delete_trajectories(keys: list[int]) -> None:
    """Remove trajectories and what belongs to them, table by table, without loading them. Totals stay as they are."""
    with transaction.atomic():
        bodies, segments = contents.keys_of(keys), segments_of(keys)
        keep_prefixes(keys)
        for model, field in _OF_TRAJECTORY:
            queryset = model.objects.filter(**{f"{field}__in": keys})
            queryset._raw_delete(queryset.db)
        contents.delete_unused(bodies)
        delete_unused(segments)


_OF_TRAJECTORY: tuple[tuple[Any, str], ...] = (
    *((model, "trajectory") for model in (
        models.ShareLink, models.Comment, models.Seen, models.StoredFinding, models.Retokenized, models.RowScores
    )),
    (models.ReplayRows, "replay__trajectory"), (models.Job, "replay__trajectory"), (models.Replay, "trajectory"),
    (models.Job, "parser_audit__trajectory"), (models.ParserAudit, "trajectory"),
    (models.RowColumn, "row__trajectory"), (models.RowTokens, "row__trajectory"), (models.StoredRow, "trajectory"),
    (models.StepTokens, "step__trajectory"), (models.StoredStep, "trajectory"), (models.StoredTrajectory, "pk"),
)
"""The tables that hold something of a trajectory, and the field that names it, in the order of removing."""


def recount(run: models.Run) -> None:
    """Count the totals of a run again, after trajectories were removed."""
    with transaction.atomic():
        # What another worker stores meanwhile is counted here, or is added after this.
        models.Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        totals: dict[str, Any] = run.trajectories.aggregate(
            n_trajectories=Count("pk"),
            n_finished=Count("pk", filter=Q(status=models.StoredTrajectory.Status.DONE)),
            n_failed=Count("pk", filter=Q(status=models.StoredTrajectory.Status.FAILED)),
            **{name: Sum(name) for name in ("n_steps", "n_rows", "n_tokens", "n_sampled")},
            n_rewards=Count("reward"),
            reward_sum=Sum("reward"),
        )
        values = {name: value or 0 for name, value in totals.items()}
        kinds = models.StoredFinding.objects.filter(run=run).values_list("kind")
        values["finding_counts"] = dict(kinds.annotate(n=Count("pk")).order_by("kind"))
        models.Run.objects.filter(pk=run.pk).update(**values)
    for name, value in values.items():
        setattr(run, name, value)


def run_of_job(job: models.Job) -> models.Run:
    """The run of a job or shard, with its tokenizer and chat templates. One query. Raises :class:`JobLost`."""
    run = find_run(templates=True, jobs=job.whole_id or job.pk)
    if run is None:
        raise JobLost
    return run


def run_and_trajectories(code: str) -> tuple[models.Run, QuerySet[models.StoredTrajectory]] | None:
    """The run with a code and its trajectories in order; or a trajectory with the code, and its run. None = there is
    neither. At most two queries, and the one for the trajectories."""
    run = find_run(templates=True, code=code)
    if run is not None:
        return run, run.trajectories.order_by("index")
    run = find_run(templates=True, trajectories__code=code)
    return None if run is None else (run, run.trajectories.filter(code=code))


def lock_run(run: models.Run) -> None:
    """Let others that lock the run wait until the transaction ends."""
    models.Run.objects.select_for_update().get(pk=run.pk)


def ask_to_stop(run: models.Run, stops: bool = True) -> None:
    """Set the flag by which those that work on a run see that they are to stop, or take it back."""
    models.Run.objects.filter(pk=run.pk).update(cancel_requested=stops)


def note_error(run: models.Run, sentence: str) -> None:
    """Say on the page of a run what is wrong; the run goes on."""
    models.Run.objects.filter(pk=run.pk).update(error=sentence)


def count_active(run: models.Run) -> int:
    """Trajectories of a run that have not ended. One query."""
    return run.trajectories.filter(status__in=models.ACTIVE).count()


def _runs_of(project: Project | None) -> QuerySet[Run]:
    return Run.objects.all() if project is None else Run.objects.filter(project=project)


def segment_bytes(project: Project | None) -> dict[int, int]:
    """Key of a run of a project (None = of all) -> the size of its segments; one without is left out. One query."""
    segments = TokenSegment.objects.filter(run__in=_runs_of(project), replaced_at=None)
    return dict(segments.values_list("run").annotate(n=Sum("n_bytes")).order_by())


def runs_by_change(project: Project | None = None) -> QuerySet[Any]:
    """The runs of a project (None = of all), the one whose last change is the oldest first. One query. Each has
    ``changed_at``, and ``is_shared``, ``has_work`` and ``has_file``: what keeps it."""
    newest = StoredTrajectory.objects.filter(run=OuterRef("pk")).order_by("-index").values("created_at")[:1]
    now, jobs = timezone.now(), Job.objects.filter(run=OuterRef("pk"))
    live = ShareLink.objects.filter(revoked_at=None, expires_at__gt=now)
    return _runs_of(project).annotate(
        changed_at=Greatest(
            F("created_at"), Coalesce(F("finished_at"), F("created_at")), Coalesce(Subquery(newest), F("created_at"))
        ),
        is_shared=Exists(live.filter(run=OuterRef("pk"))) | Exists(live.filter(trajectory__run=OuterRef("pk"))),
        has_work=Exists(jobs.filter(status__in=ACTIVE))
        | Exists(Job.objects.filter(replay__trajectory__run=OuterRef("pk"), status__in=ACTIVE))
        | Exists(Job.objects.filter(parser_audit__trajectory__run=OuterRef("pk"), status__in=ACTIVE)),
        has_file=Exists(jobs.filter(kind="export", status=Job.Status.DONE, expires_at__gt=now)),
    ).order_by("changed_at", "pk")


def with_change(run: Run) -> Any | None:
    """A run as it is now, as :func:`runs_by_change` has it; None = it is gone. One query."""
    return runs_by_change().filter(pk=run.pk).first()


MAX_TAG = 40
MAX_TAGS = 20  # Tags of one run.


def read_tags(text: str) -> list[str]:
    """Tags from a text with commas, each once. Raises :class:`Refusal`."""
    names = list(dict.fromkeys(" ".join(storable_text(part).split()) for part in text.split(",")))
    names = [name for name in names if name]
    if not names:
        raise Refusal("Write a tag, or several with commas between them.")
    if long := next((name for name in names if len(name) > MAX_TAG), None):
        raise Refusal(f"A tag has at most {MAX_TAG} characters; “{long[:MAX_TAG]}…” is longer.")
    return names


def rename_run(run: Run, name: str) -> None:
    """Give a run another name. Raises ``ValueError`` for an empty one."""
    name = " ".join(storable_text(name).split())[:200]
    if not name:
        raise Refusal(f"The run “{run.name}” needs a name.")
    if name != run.name:
        before, run.name = run.name, name
        run.save(update_fields=["name"])
        record(Action.RENAMED, run, detail=f"before: {before}")


def add_tags(run: Run, names: Sequence[str]) -> None:
    """Add tags to a run. Raises :class:`Refusal` when it would have too many."""
    present = set(run.tags.values_list("name", flat=True))
    new = [name for name in names if name not in present]
    if len(present) + len(new) > MAX_TAGS:
        raise Refusal(f"The run “{run.name}” would have more than {MAX_TAGS} tags. Remove some first.")
    RunTag.objects.bulk_create([RunTag(run=run, name=name) for name in new], ignore_conflicts=True)
    if new:
        record(Action.TAGGED, run, detail=f"added: {', '.join(new)}")


def remove_tags(run: Run, names: Sequence[str]) -> None:
    """Remove tags from a run; those that it lacks are nothing to it."""
    gone = [name for name in names if run.tags.filter(name=name).delete()[0]]
    if gone:
        record(Action.TAGGED, run, detail=f"removed: {', '.join(gone)}")


def tags_of(runs: Sequence[models.Run]) -> dict[int, list[str]]:
    """Key of a run -> its tags by name. One query."""
    names: dict[int, list[str]] = {}
    for run, name in models.RunTag.objects.filter(run__in=runs).order_by("name").values_list("run", "name"):
        names.setdefault(run, []).append(name)
    return names


def known_tags(access: Access, limit: int) -> list[str]:
    """The first tags by name of the runs that may be seen. One query."""
    tags = access.limit(models.RunTag.objects.all(), "run__project")
    return list(tags.order_by("name").values_list("name", flat=True).distinct()[:limit])
