"""Findings: stored, replaced, and read."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from django.db import transaction
from django.db.models import Count, Min, Q, QuerySet

from rollout_inspector.diagnose import VERSION
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollouts.store import models
from rollouts.store.bulk import bare, insert_whole, reserve_keys
from rollouts.store.parameters import SEVERITIES
from rollouts.store.text import storable_text


def worst_severity(severities: Iterable[str]) -> str:
    """The worst severity of some findings; empty = there are none."""
    return min((str(severity) for severity in severities), key=SEVERITIES.index, default="")


def set_findings(record: models.StoredTrajectory, findings: Sequence[Finding]) -> None:
    """Set what a trajectory says of its findings."""
    record.n_findings = len(findings)
    record.worst_severity = worst_severity(finding.severity for finding in findings)


def note_diagnosed(run: models.Run) -> None:
    """Note that the current version of the diagnosis has diagnosed every trajectory of the run."""
    run.diagnosis_version = VERSION
    run.save(update_fields=["diagnosis_version"])


def add_findings(run: models.Run, found: Sequence[tuple[models.StoredTrajectory, Sequence[Finding]]]) -> Counter[str]:
    """Insert findings, inside a transaction. Returns the number of each kind. The caller updates the totals. Pass every
    trajectory that was diagnosed, also those without findings."""
    keys = reserve_keys(models.StoredFinding, sum(len(findings) for _, findings in found))
    records = [
        bare(
            models.StoredFinding,
            id=next(keys),
            trajectory_id=trajectory.pk,
            run_id=run.pk,
            step_index=finding.step,
            row_index=finding.row,
            axis=finding.axis,
            kind=finding.kind,
            severity=finding.severity,
            start=finding.start,
            stop=finding.stop,
            expected_ids=finding.expected_ids,
            actual_ids=finding.actual_ids,
            expected_text=storable_text(finding.expected_text),
            actual_text=storable_text(finding.actual_text),
            message_index=finding.message_index,
            evidence=storable_text(finding.evidence),
            remedy=storable_text(finding.remedy),
            missing=storable_text(finding.missing)[:200],
            places=[edge for place in finding.places for edge in place] or None,
            version=VERSION,
            **vars(finding.cost),  # each field is a column of its name
        )
        for trajectory, findings in found
        for finding in findings
    ]
    insert_whole(records)
    if run.diagnosis_version is None:
        models.Run.objects.filter(pk=run.pk, diagnosis_version=None).update(diagnosis_version=VERSION)
        run.diagnosis_version = VERSION
    return Counter(record.kind for record in records)


def replace_findings(run: models.Run, found: Sequence[tuple[models.StoredTrajectory, Sequence[Finding]]]) -> None:
    """Put new findings in place of the old ones of these trajectories, and correct all totals. The outcomes of the
    checks are those that ``checks`` of each trajectory holds, and the gap is its ``gap``."""
    with transaction.atomic():
        locked = models.Run.objects.select_for_update().get(pk=run.pk)
        old = models.StoredFinding.objects.filter(trajectory__in=[trajectory.pk for trajectory, _ in found])
        counts = Counter(locked.finding_counts)
        counts.subtract(Counter(old.values_list("kind", flat=True)))
        old.delete()
        counts.update(add_findings(run, found))
        for trajectory, findings in found:
            set_findings(trajectory, findings)
        models.StoredTrajectory.objects.bulk_update(
            [t for t, _ in found], ["n_findings", "worst_severity", "n_lost", "checks", "gap"], batch_size=200
        )
        run.finding_counts = {kind: n for kind, n in counts.items() if n > 0}
        models.Run.objects.filter(pk=run.pk).update(finding_counts=run.finding_counts)


def find_finding_of_run(run: models.Run, kinds: Sequence[str]) -> models.StoredFinding | None:
    """Kind and evidence of the first finding of these kinds that has neither step nor row. One query."""
    findings = run.findings.filter(kind__in=kinds, step_index=None, row_index=None)
    return findings.only("kind", "evidence").order_by("pk").first()


def places_of_kinds(trajectory: models.StoredTrajectory, kinds: Sequence[str]) -> dict[str, tuple[int, str | None]]:
    """Kind -> how many trajectories of the run have it, and the code of the next of them; None = there is no other.
    Behind the last one follows the first. Two queries."""
    run, here = trajectory.run_id, trajectory.index
    findings = models.StoredFinding.objects.filter(run=run, kind__in=kinds).order_by().values_list("kind")
    rows = list(findings.annotate(
        n=Count("trajectory", distinct=True),
        later=Min("trajectory__index", filter=Q(trajectory__index__gt=here)),
        first=Min("trajectory__index"),
    ))
    indices = {kind: first if later is None else later for kind, _, later, first in rows}
    trajectories = models.StoredTrajectory.objects.filter(run=run, index__in=set(indices.values()) - {here})
    codes = dict(trajectories.values_list("index", "code"))
    return {kind: (n, codes.get(indices[kind])) for kind, n, *_ in rows}


def finding_kinds(trajectories: Sequence[models.StoredTrajectory]) -> dict[int, dict[str, str]]:
    """Key of a trajectory -> kind of its findings -> the worst severity of the kind, the worst first. One query."""
    keys = [record.pk for record in trajectories if record.n_findings]
    kinds: dict[int, dict[str, str]] = {}
    if keys:
        rows = models.StoredFinding.objects.filter(trajectory__in=keys).order_by().distinct()
        pairs = set(rows.values_list("trajectory", "severity", "kind"))
        worst_first = {severity.value: place for place, severity in enumerate(Severity)}
        for trajectory, severity, kind in sorted(pairs, key=lambda pair: (worst_first[pair[1]], pair[2])):
            kinds.setdefault(trajectory, {}).setdefault(kind, severity)
    return kinds


def list_findings(trajectories: QuerySet[models.StoredTrajectory], kind: str = "") -> Iterator[models.StoredFinding]:
    """The findings of a query's trajectories, of one kind or of all, each with its trajectory, in order. One query."""
    chosen = {"kind": kind} if kind else {}
    findings = models.StoredFinding.objects.filter(trajectory__in=trajectories.order_by().values("pk"), **chosen)
    in_order = findings.select_related("trajectory").order_by("trajectory__index", "step_index", "start", "pk")
    return in_order.iterator(500)


def places_of_findings(
    trajectories: Sequence[models.StoredTrajectory], without_kind: str
) -> dict[int, list[models.StoredFinding]]:
    """Key of a trajectory -> its findings, as far as they say where they are and how grave. One query."""
    findings = models.StoredFinding.objects.filter(trajectory__in=[record.pk for record in trajectories])
    columns = ("trajectory_id", "axis", "kind", "severity", "row_index", "step_index", "start", "stop", "places")
    by_trajectory: dict[int, list[models.StoredFinding]] = defaultdict(list)
    for finding in findings.exclude(kind=without_kind).order_by("pk").only(*columns):
        by_trajectory[finding.trajectory_id].append(finding)
    return by_trajectory


def kinds_by_row(trajectories: Sequence[models.StoredTrajectory]) -> dict[int, dict[int, set[str]]]:
    """Key of a trajectory -> index of a row -> the kinds of its findings. One query."""
    kinds: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    keys = [record.pk for record in trajectories]
    of_rows = models.StoredFinding.objects.filter(trajectory__in=keys, row_index__isnull=False).order_by()
    for key, row, kind in of_rows.values_list("trajectory", "row_index", "kind"):
        assert row is not None
        kinds[key][row].add(kind)
    return kinds


def first_finding_of_stream(run: models.Run, external_id: str) -> models.StoredFinding | None:
    """The first finding of a trajectory's stream that costs something. One query."""
    of_stream = models.StoredFinding.objects.filter(run=run, trajectory__external_id=external_id, axis=Axis.STREAM)
    return of_stream.exclude(severity=Severity.INFO).order_by("step_index", "start").first()
