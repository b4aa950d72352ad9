"""What a search over runs reads: runs, trajectories, findings and metadata, each in parts."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet, Sum

from rollouts.store.models import Run, StoredFinding, StoredStep, StoredTrajectory, Tokenizer
from rollouts.store.people.access import Access
from rollouts.store.trajectory_filters import TrajectoryFilters, filter_trajectories

RUNS_AT_ONCE = 50
NAMES = ("external_id", "group", "stop_reason", "tokenizer_name")  # Columns of a trajectory that are metadata.
BODIES = ("extra", "task")  # Stored JSON of a trajectory.


def searched_runs(access: Access, run: Run | None = None, project: str = "") -> QuerySet[Run]:
    """One run, those of the project with a code, or all; as far as they may be seen."""
    runs = access.limit(Run.objects.all())
    return runs.filter(pk=run.pk) if run is not None else runs.filter(project__code=project) if project else runs


def sum_of_trajectories(runs: QuerySet[Run]) -> int:
    """The trajectories of runs. One query."""
    return runs.aggregate(n=Sum("n_trajectories"))["n"] or 0


def tokenizer_files(runs: QuerySet[Run]) -> list[str]:
    """The hashes of the files of the tokenizers of runs, each once. One query."""
    used = Tokenizer.objects.filter(pk__in=runs.exclude(tokenizer=None).values("tokenizer"))
    return list(used.values_list("files_sha256", flat=True).distinct())


def newest_first(runs: QuerySet[Run], created_at: datetime | None = None, key: int = 0) -> Iterator[Run]:
    """Runs with project and tokenizer, the newest first, from the one with this time and key on; a part at a time."""
    runs = runs.select_related("project", "tokenizer").order_by("-created_at", "-id")
    if created_at is not None:
        runs = runs.filter(Q(created_at__lt=created_at) | Q(created_at=created_at, pk__lte=key))
    while part := list(runs[:RUNS_AT_ONCE]):
        yield from part
        last = part[-1]
        runs = runs.filter(Q(created_at__lt=last.created_at) | Q(created_at=last.created_at, pk__lt=last.pk))


def trajectories_from(
    run: Run, filters: TrajectoryFilters, index: int, limit: int
) -> list[tuple[int, int, str, str, int]]:
    """Key, index, code, external id and tokens of the trajectories that pass, from an index on. One query."""
    passing = filter_trajectories(run, filters).order_by("index").filter(index__gte=index)
    return list(passing.values_list("pk", "index", "code", "external_id", "n_tokens")[:limit])


def findings_among(run: Run, keys: Sequence[int], filters: TrajectoryFilters) -> list[StoredFinding]:
    """The findings of trajectories of the kind, severity and step that are asked for. One query."""
    columns = {"kind": filters.kind, "severity": filters.severity, "step_index": filters.step}
    chosen = {name: value for name, value in columns.items() if value not in ("", None)}
    findings = StoredFinding.objects.filter(run=run, trajectory__in=keys, **chosen)
    in_order = findings.order_by("trajectory_id", "step_index", "row_index", "start", "pk")
    return list(in_order.defer("expected_ids", "actual_ids", "places"))


def rows_of_steps(findings: Sequence[StoredFinding]) -> dict[tuple[int, int | None], int]:
    """(trajectory, step) -> the row of the step, for the steps of findings. One query; none without findings."""
    keys = {finding.trajectory_id for finding in findings}
    if not keys:
        return {}
    steps = StoredStep.objects.filter(trajectory__in=keys, index__in={finding.step_index for finding in findings})
    return {(key, index): row for key, index, row in steps.values_list("trajectory", "index", "row_index")}


def metadata_with(keys: Sequence[int], text: str, as_json: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Key and metadata by name of the trajectories whose metadata hold a text, in order. One query. ``as_json``: the
    text as it stands in JSON."""
    matches = Q(code=text)
    for column in NAMES:
        matches |= Q(**{f"{column}__icontains": text})
    for column in BODIES:
        matches |= Q(**{f"{column}__body__icontains": as_json})
    trajectories = StoredTrajectory.objects.filter(matches, pk__in=keys).order_by("index")
    for key, *values in trajectories.values_list("pk", *NAMES, *(f"{column}__body" for column in BODIES)):
        yield key, dict(zip((*NAMES, *BODIES), values, strict=True))


def trajectories_named(
    access: Access, runs: Sequence[Run], text: str, limit: int, most: int = 1000
) -> list[StoredTrajectory]:
    """The trajectory with a code, or those whose names hold a text among the first ``most`` of each of these runs. With
    their runs, the newest first. One query, which reads at most ``most`` lines of each run."""
    matches = Q(run__in=[run.pk for run in runs], index__lt=most, external_id__icontains=text) | Q(code=text)
    trajectories = access.limit(StoredTrajectory.objects.filter(matches), "run__project").select_related("run")
    return list(trajectories.order_by("-run_id", "index")[:limit])
