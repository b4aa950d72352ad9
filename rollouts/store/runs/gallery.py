"""The run that holds the gallery, and what of it the pages show."""

from collections.abc import Collection

from django.db.models import F, Q

from rollouts.store.models import Project, Run, StoredFinding, StoredTrajectory
from rollouts.store.people.access import Access

KEY = "gallery"  # In the settings of a run: the version of the bundle that it was made from.
TRAINING_KEY = "training_run"
"""In the settings of a run: which bundled run of training it holds, as a hash of its file."""


def find_gallery(version: str, of: Project | Access) -> Run | None:
    """The newest run of a project, or of those that may be seen, that was made from this version. One query. Its
    tokenizer is loaded."""
    galleries = Run.objects.select_related("tokenizer").filter(**{f"settings__{KEY}": version}, status=Run.Status.DONE)
    galleries = galleries.filter(project=of) if isinstance(of, Project) else of.limit(galleries)
    return galleries.order_by("-created_at", "-pk").first()


def gallery_trajectories(run: Run) -> list[StoredTrajectory]:
    """The trajectories of the gallery, in its order. One query."""
    return list(run.trajectories.order_by("index"))


def gallery_findings(run: Run, others: Collection[str]) -> dict[str, StoredFinding]:
    """Name of a trajectory -> its gravest finding of the kind that it is called after. One query. ``others``: names of
    trajectories that are called after no kind; of these all findings count."""
    of_its_kind = Q(kind=F("trajectory__external_id")) | Q(trajectory__external_id__in=others)
    findings = StoredFinding.objects.filter(of_its_kind, run=run).select_related("trajectory")
    return {finding.trajectory.external_id: finding for finding in findings.order_by("-severity", "-pk")}


def find_training_run(digest: str, project: Project) -> Run | None:
    """The run of a project that holds the bundled run of training with this hash, unless it failed. One query."""
    runs = Run.objects.filter(project=project, **{f"settings__{TRAINING_KEY}": digest})
    return runs.exclude(status__in=(Run.Status.FAILED, Run.Status.CANCELLED)).first()
