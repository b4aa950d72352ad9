"""Figures of a run by training step: counted from the tables, stored, and read."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from django.db import transaction
from django.db.models import Count, Exists, F, Max, Min, OuterRef, Q, QuerySet, Sum

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.diagnose.gap.figures import GapFigures, added
from rollout_inspector.formats.training_step import MAX_STEP
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.figures import reward_mean, rows_per_call, share
from rollouts.store.models import Run, StoredFinding, StoredStep, StoredTrajectory, TrainingStepFigures
from rollouts.store.models.training_steps import CountedFigures
from rollouts.store.runs.alarms import take_alarms
from rollouts.store.runs.run_summary import cost_sum

PARAMETERS = 500  # Training steps that one query names.
NOT_DECIDABLE = "not_decidable"
"""A kind that is no fault, but a check that the source does not allow. It is counted like the others."""
TRUNCATED = "length"  # The reason of a completion that was cut by its length.


def count_training_steps(run: Run, steps: Collection[int] | None = None) -> list[TrainingStepFigures]:
    """The figures of these training steps (None = of all), not stored. A step without trajectories is left out. Five
    queries for each :data:`PARAMETERS` steps, or five for all."""
    parts: Iterable[Sequence[int] | None] = [None] if steps is None else batched(sorted(set(steps)), PARAMETERS)
    return [figures for part in parts for figures in _counted(run, part)]


def _counted(run: Run, steps: Sequence[int] | None) -> Iterator[TrainingStepFigures]:
    chosen = {"training_step__isnull": False} if steps is None else {"training_step__in": steps}
    of_trajectory = {f"trajectory__{name}": value for name, value in chosen.items()}
    trajectories = StoredTrajectory.objects.filter(run=run, **chosen).order_by()
    calls = StoredStep.objects.filter(trajectory__run=run, **of_trajectory)
    findings = StoredFinding.objects.filter(run=run, **of_trajectory)
    if steps is not None:  # by the keys of the few trajectories: else a database reads all findings of the run
        findings = StoredFinding.objects.filter(trajectory__in=trajectories.values("pk"))
    for step, fields in figures_by(trajectories, "training_step", findings, calls, "trajectory__training_step"):
        yield TrainingStepFigures(run=run, training_step=step, **fields)


def figures_by(
    held: QuerySet[StoredTrajectory], axis: str, findings: QuerySet[StoredFinding], calls: QuerySet[StoredStep],
    axis_of_parts: str,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each value of a column of trajectories, in order, and the columns of its figures. Five queries. ``findings`` and
    ``calls``: those of the trajectories; their column ``axis_of_parts`` has the same values."""
    totals: Any = held.values(axis).annotate(
        n_trajectories=Count("pk"), n_broken=Count("pk", filter=Q(worst_severity=Severity.ERROR)),
        first=Min("index"), last=Max("index"), unknown=Count("pk", filter=Q(n_lost=None)),
        n_rewards=Count("reward"), rewards=Sum("reward", default=0.0),
        **{f"sum_{name}": Sum(name, default=0) for name in _SUMMED},
    )
    kinds: dict[Any, dict[str, int]] = defaultdict(dict)
    repaid: dict[Any, int] = defaultdict(int)
    lines: Any = findings.order_by().values_list(axis_of_parts, "kind").annotate(
        n=Count("trajectory", distinct=True), again=cost_sum("prompt_tokens_repaid")
    )
    for key, kind, n, again in lines:
        kinds[key][kind] = n
        repaid[key] += again
    with_reason: Any = calls.exclude(finish_reason="").order_by().values_list(axis_of_parts)
    cut = Count("trajectory", distinct=True, filter=Q(finish_reason=TRUNCATED))
    truncated = dict(with_reason.annotate(n=cut))
    groups = _groups(held, axis)
    gaps = _gaps(held, axis)
    for total in totals.order_by(axis):
        key = total[axis]
        n_groups, n_same = groups.get(key, (0, 0))
        yield key, {
            "first_index": total["first"], "last_index": total["last"],
            "n_trajectories": total["n_trajectories"], "n_broken": total["n_broken"],
            "n_rewards": total["n_rewards"], "reward_sum": total["rewards"],
            **{name: total[f"sum_{name}"] for name in _SUMMED if name != "n_lost"},
            "n_lost": None if total["unknown"] else total["sum_n_lost"], "n_repaid": repaid.get(key, 0),
            "n_truncated": truncated.get(key), "n_groups": n_groups, "n_same_reward": n_same,
            "finding_counts": kinds.get(key, {}), "gap": gaps.get(key),
        }


_SUMMED = ("n_steps", "n_rows", "n_tokens", "n_sampled", "n_trained", "n_lost")


def _groups(held: QuerySet[StoredTrajectory], axis: str) -> dict[Any, tuple[int, int]]:
    """Value of a column -> groups with at least two rewards, and those of them whose rewards are all equal."""
    scored: Any = held.exclude(group="").filter(reward__isnull=False).values_list(axis, "group", "reward")
    rewards: dict[tuple[Any, str], tuple[int, bool, float]] = {}
    for key, group, reward in scored.iterator(10_000):
        n, same, first = rewards.get((key, group), (0, True, reward))
        rewards[key, group] = n + 1, same and reward == first, first
    counts: dict[Any, tuple[int, int]] = {}
    for (key, _), (n, same, _) in rewards.items():
        groups, equal = counts.get(key, (0, 0))
        if n > 1:
            counts[key] = groups + 1, equal + same
    return counts


def _gaps(held: QuerySet[StoredTrajectory], axis: str) -> dict[Any, dict[str, float | int | None]]:
    """Value of a column -> the figures of the gap over its trajectories, as pages and commands show them."""
    gaps: dict[Any, list[GapFigures]] = defaultdict(list)
    values: Any = held.exclude(gap=None).values_list(axis, "gap")
    for key, value in values.iterator(2_000):
        gaps[key].append(GapFigures.from_json(value))
        if len(gaps[key]) == 200:
            gaps[key] = [added(gaps[key])]
    sums = {key: added(figures) for key, figures in gaps.items()}
    return {key: {**gap.values(), "low": gap.quantile(0.01), "high": gap.quantile(0.99)} for key, gap in sums.items()}


def has_training_steps(run: Run) -> bool:
    """Whether a trajectory of the run has a training step. One query, which an index answers."""
    return StoredTrajectory.objects.filter(run=run, training_step__isnull=False).order_by().exists()


def runs_beside(run: Run, limit: int) -> list[Run]:
    """The newest other runs of the project that have training steps. One query."""
    counted = TrainingStepFigures.objects.filter(run=OuterRef("pk"))
    others = Run.objects.filter(Exists(counted), project=run.project_id).exclude(pk=run.pk)
    return list(others.order_by("-created_at", "-pk").only("pk", "code", "name", "project")[:limit])


def without_training_step(run: Run) -> int:
    """Trajectories of the run that have no training step. One query."""
    counted = TrainingStepFigures.objects.filter(run=run).aggregate(n=Sum(F("n_trajectories"), default=0))
    return max(run.n_trajectories - int(counted["n"]), 0)


def stored_after(run: Run, key: int) -> QuerySet[StoredTrajectory]:
    """The trajectories of a pushed run that were stored after the one with this key, in that order. Keys and positions
    of a pushed run grow together, and an index leads to positions. One query, and one later."""
    last = StoredTrajectory.objects.filter(pk=key, run=run).values_list("index", flat=True).first() if key else None
    trajectories = StoredTrajectory.objects.filter(run=run, pk__gt=key).order_by("index")
    return trajectories if last is None else trajectories.filter(index__gt=last)


@dataclass(frozen=True, kw_only=True)
class FiguresLine:
    """The figures of some trajectories. A share is of these, from 0 to 1."""

    trajectories: int
    """Stored trajectories."""
    broken: int
    """Trajectories with a finding of severity error."""
    findings: dict[str, int]
    """Kind -> trajectories that have such a finding."""
    tokens_per_trajectory: float
    """Mean number of stored tokens."""
    sampled: int
    """Tokens that the engine sampled."""
    lost: int | None
    """Sampled tokens that no row trains as they were sampled; None = not known of some trajectory."""
    repaid: int | None
    """Prompt tokens that were computed again because of breaks; None = no engine call is recorded."""
    rows_per_call: float | None
    """Training rows for each engine call; None without calls."""
    truncated: int | None
    """Trajectories with a completion that was cut by its length; None = no finish reason is recorded."""
    reward_mean: float | None
    """Of the trajectories that have a reward; None without one."""
    groups: int
    """Groups with at least two rewards."""
    same_reward: int
    """Groups of these whose rewards are all equal: they teach nothing."""
    gap: dict[str, float | int | None] | None
    """The gap between trainer and sampler; None = no row has the log-probabilities of both."""
    first: int | None
    """Position of the first of these trajectories in the run; None = an older version counted them."""
    last: int | None
    """Position of the last one."""

    @classmethod
    def of(cls, held: CountedFigures) -> Self:
        """The line of what is stored. The fields of a class below have the names of columns."""
        n_steps = held.n_steps
        return cls(
            trajectories=held.n_trajectories,
            broken=held.n_broken,
            findings=held.finding_counts,
            tokens_per_trajectory=share(held.n_tokens, held.n_trajectories),
            sampled=held.n_sampled,
            lost=held.n_lost,
            repaid=held.n_repaid if n_steps else None,
            rows_per_call=rows_per_call(held.n_rows, n_steps),
            truncated=held.n_truncated,
            reward_mean=reward_mean(held.reward_sum, held.n_rewards),
            groups=held.n_groups,
            same_reward=held.n_same_reward,
            gap=held.gap,
            first=held.first_index,
            last=held.last_index,
            **{name: getattr(held, name) for name in cls.__annotations__},
        )


@dataclass(frozen=True, kw_only=True)
class TrainingStepLine(FiguresLine):
    """The figures of one training step."""

    training_step: int
    """The step of the trainer."""


def over_training(
    run: Run, least: int | None = None, most: int | None = None
) -> tuple[list[TrainingStepLine], dict[str, int]]:
    """The stored figures of a run by training step, in order; a step without trajectories is left out. And each kind of
    a finding -> the first step of all that has it, the earliest first. One query."""
    stored = list(TrainingStepFigures.objects.filter(run=run).order_by("training_step"))
    low, high = -1 if least is None else least, MAX_STEP if most is None else most
    lines = [TrainingStepLine.of(figures) for figures in stored if low <= figures.training_step <= high]
    return lines, began(stored)


def training_steps_of(
    runs: Sequence[Run], least: int | None = None, most: int | None = None
) -> dict[int, list[TrainingStepLine]]:
    """Key of a run -> its stored figures by training step, in order. One query."""
    low, high = -1 if least is None else least, MAX_STEP if most is None else most
    stored = TrainingStepFigures.objects.filter(run__in=runs, training_step__gte=low, training_step__lte=high)
    lines: dict[int, list[TrainingStepLine]] = {run.pk: [] for run in runs}
    for figures in stored.order_by("run", "training_step"):
        lines[figures.run_id].append(TrainingStepLine.of(figures))
    return lines


def began(figures: Sequence[TrainingStepFigures]) -> dict[str, int]:
    """Kind of a finding -> the first training step that has it."""
    first: dict[str, int] = {}
    for step in figures:
        for kind, n in step.finding_counts.items():
            if n:
                first.setdefault(kind, step.training_step)
    return dict(sorted(first.items(), key=lambda item: (item[1], item[0])))


def take_training_steps(run: Run, steps: Collection[int] | None = None) -> None:
    """Count the figures of these training steps of a run again; None = of all. Counting is read, so it may be repeated.

    The alarms of the run are checked by the new figures.

    Two workers may count the same step at once. Each replaces whole figures, and the last to be asked counts last.
    """
    stored = TrainingStepFigures.objects.filter(run=run)
    is_any = steps is not None or has_training_steps(run)
    if not is_any and not stored.exists():
        return
    figures = count_training_steps(run, steps) if is_any else []
    with transaction.atomic():
        Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        (stored if steps is None else stored.filter(training_step__in=steps)).delete()
        TrainingStepFigures.objects.bulk_create(figures, batch_size=200)
        take_alarms(run)
