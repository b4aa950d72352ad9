"""The damage of findings to the gradient, as a job measured it: stored, and read for pages, API and commands."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from django.db import transaction
from django.db.models import Avg, Count, F, Max, QuerySet, Sum

from rollout_inspector.streams.trajectory import NO_IDS, Floats
from rollouts.store.models import Run, StoredFinding, StoredTrajectory, TrajectoryDamage
from rollouts.store.trajectories.trajectories import finished_trajectories
from rollouts.store.trajectories.trajectory_parts import READING_ORDER

FIGURES = ("cosine", "relative_error", "norm_ratio", "rule", "missing")  # What is told of the damage of a trajectory.


def keep_damage(
    record: StoredTrajectory, findings: Sequence[StoredFinding], shares: Mapping[int, float], **fields: Any
) -> None:
    """Put the damage of a trajectory in place of an older one; a deleted trajectory is left out. ``shares``: number of
    a finding, from 1 -> its share; a finding that is not in it has none of the difference."""
    damage = fields.get("relative_error")
    with transaction.atomic():
        if StoredTrajectory.objects.filter(pk=record.pk).update(damage=damage):
            TrajectoryDamage.objects.update_or_create(
                trajectory_id=record.pk, defaults={"rows": NO_IDS, "norms": NO_IDS.astype("f4"), **fields}
            )
            stored = StoredFinding.objects.filter(trajectory=record.pk)
            stored.update(damage_share=None if damage is None else 0.0)
            for number, share in shares.items():
                if number:
                    stored.filter(pk=findings[number - 1].pk).update(damage_share=share)


def measurable(run: Run, code: str = "") -> QuerySet[StoredTrajectory]:
    """The finished trajectories of a run in order; ``code``: of the only one."""
    finished = finished_trajectories(run)
    return finished.filter(code=code) if code else finished


def not_measured_since(trajectories: QuerySet[StoredTrajectory], since: Any) -> QuerySet[StoredTrajectory]:
    """Those of a query that were not measured from then on."""
    return trajectories.exclude(pk__in=TrajectoryDamage.objects.filter(made_at__gte=since).values("trajectory"))


def token_norms(record: StoredTrajectory, row: int, n_tokens: int) -> Floats | None:
    """The norm of each token's contribution to the gradient ``[n]``; None where none of that length is stored."""
    damage = TrajectoryDamage.objects.filter(trajectory=record.pk).only("rows", "norms").first()
    lengths = [] if damage is None else damage.rows[::2].tolist()
    if damage is None or row >= len(lengths) or lengths[row] != n_tokens:
        return None
    start = sum(lengths[:row])
    norms: Floats = damage.norms[start : start + n_tokens]
    return norms


def run_damage(run: Run) -> dict[str, Any]:
    """How many trajectories of a run were measured, their mean and largest relative error, the means of their cosines
    and ratios of norms, and the sums by kind. The damage of a kind is the sum over its findings of share * relative
    error. Three queries at most."""
    totals = run.trajectories.aggregate(measured=Count("damage"), mean=Avg("damage"), largest=Max("damage"))
    if not totals["measured"]:
        return {**totals, "cosine": None, "norm_ratio": None, "kinds": {}}
    stored = TrajectoryDamage.objects.filter(trajectory__run=run)
    means = stored.aggregate(cosine=Avg("cosine"), norm_ratio=Avg("norm_ratio"))
    of_kinds = run.findings.filter(damage_share__isnull=False).order_by().values_list("kind")
    sums = of_kinds.annotate(damage=Sum(F("damage_share") * F("trajectory__damage")))
    return {**totals, **means, "kinds": dict(sums)}


def damage_report(trajectories: QuerySet[StoredTrajectory]) -> dict[str, Any]:
    """The damage of some trajectories, as commands and the API tell it. Two queries. ``missing`` says why one was not
    measured. Its figures are then null, never 0."""
    damages = list(
        TrajectoryDamage.objects.filter(trajectory__in=trajectories.values("pk")).defer("rows", "norms")
        .select_related("trajectory").order_by("trajectory__index")
    )
    findings = StoredFinding.objects.filter(trajectory__in=[damage.pk for damage in damages])
    in_order = findings.order_by("trajectory", *READING_ORDER).values_list("trajectory", "kind", "damage_share")
    shares = {key: list(lines) for key, lines in groupby(in_order, key=lambda line: line[0])}
    return {
        "exact": all(not damage.layers for damage in damages),
        "layers": sorted({damage.layers for damage in damages if damage.layers}),
        "trajectories": [
            {
                "trajectory": damage.trajectory.code,
                **{name: getattr(damage, name) for name in FIGURES},
                "findings": [
                    {"number": number, "kind": kind, "share": share}
                    for number, (_, kind, share) in enumerate(shares.get(damage.pk, ()), start=1)
                ],
            }
            for damage in damages
        ],
    }
