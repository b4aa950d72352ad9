"""What decides whether a run is too old or too large, and what keeps it."""

from typing import Any

from django.db.models import Exists, F, OuterRef, QuerySet, Subquery, Sum
from django.db.models.functions import Coalesce, Greatest
from django.utils import timezone

from rollouts.store.models import ACTIVE, Job, Project, Run, ShareLink, StoredTrajectory, TokenSegment


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
