"""The trajectories of one prompt: their rewards, the advantages that a trainer stored, where their samples diverge."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from django.db.models import Count, Max, Min, Sum

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.streams.figures import reward_mean
from rollout_inspector.streams.trajectory import NO_IDS, Ids
from rollouts.store import models
from rollouts.store.models import Run, StoredRow, StoredStep, StoredTrajectory
from rollouts.store.token_arrays.reading import attach_steps, columns_of_rows, rows_with_tokens

MAX_READ_TOKENS = 8_000_000  # Sampled tokens, and tokens of rows, that are read for a page of a group.
MAX_SIBLING_REWARDS = 5_000  # Rewards of a group that are read for the page of one of its trajectories.
ADVANTAGES = "advantages"  # The name of the trainer's column.


def trajectories_of_group(run: Run, group: str, limit: int) -> list[StoredTrajectory]:
    """The trajectories of a group, the best reward first, those without a reward last. One query. ``limit``: the first
    of them in run order."""
    trajectories = list(run.trajectories.filter(group=group).order_by("index")[:limit])
    return sorted(trajectories, key=lambda one: (one.reward is None, -(one.reward or 0.0), one.index))


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """What GRPO makes of the rewards of a group: (reward − mean) / standard deviation with n − 1. As in TRL and verl,
    but without their small number in the divisor. Equal rewards make 0; None stays None."""
    present = [reward for reward in rewards if reward is not None]
    if len(present) < 2:
        return [None] * len(rewards)
    mean = math.fsum(present) / len(present)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in present) / (len(present) - 1))
    flat = min(present) == max(present) or not spread
    return [None if reward is None else 0.0 if flat else (reward - mean) / spread for reward in rewards]


def advantages_of_groups(run: Run) -> dict[int, float]:
    """Key of a trajectory -> its :func:`group_advantages` among those of its group and training step. One query. A
    trajectory without a group, without a reward or without a sibling that has one is left out."""
    scored = run.trajectories.exclude(group="").filter(reward__isnull=False).order_by()
    groups: dict[tuple[int | None, str], list[tuple[int, float]]] = defaultdict(list)
    for key, step, group, reward in scored.values_list("pk", "training_step", "group", "reward").iterator(10_000):
        assert reward is not None
        groups[step, group].append((key, reward))
    advantages: dict[int, float] = {}
    for members in groups.values():
        values = group_advantages([reward for _, reward in members])
        advantages.update({key: value for (key, _), value in zip(members, values, strict=True) if value is not None})
    return advantages


def advantage_in_group(trajectory: StoredTrajectory) -> float | None:
    """What :func:`advantages_of_groups` says of one trajectory; also None in a very large group. At most one query."""
    if not trajectory.group or trajectory.reward is None:
        return None
    of_run = StoredTrajectory.objects.filter(run_id=trajectory.run_id, group=trajectory.group, reward__isnull=False)
    alike = of_run.filter(training_step=trajectory.training_step)  # None means: without one
    rewards = list(alike.order_by().values_list("reward", flat=True)[: MAX_SIBLING_REWARDS + 1])
    if len(rewards) > MAX_SIBLING_REWARDS or trajectory.reward not in rewards:
        return None
    return group_advantages(rewards)[rewards.index(trajectory.reward)]


def sampled_tokens(trajectories: Sequence[StoredTrajectory]) -> tuple[dict[int, Ids], dict[int, float], bool]:
    """Key of a trajectory -> its sampled tokens in order; and -> the mean advantage of its trained tokens. Of a
    trajectory without steps the trained tokens of its rows count as sampled. The last value is False when the group is
    so large that only the first completion of each was read; of such rows nothing is read. Three queries."""
    keys = [record.pk for record in trajectories]
    whole = sum(record.n_sampled for record in trajectories) <= MAX_READ_TOKENS
    steps = StoredStep.objects.filter(trajectory__in=keys, **({} if whole else {"index": 0}))
    steps = steps.select_related("tokens", "segment").order_by("trajectory_id", "index")
    sampled: dict[int, list[Ids]] = defaultdict(list)
    narrow = steps.only(
        "trajectory_id", "index", "segment_offset", "segment__key", "tokens__step", "tokens__completion_ids"
    )
    for step in attach_steps(narrow, ("completion_ids",)):
        sampled[step.trajectory_id].append(step.tokens.completion_ids)
    advantages: dict[int, float] = {}
    if sum(record.n_tokens for record in trajectories if record.n_steps == 0 or record.n_rows) <= MAX_READ_TOKENS:
        own = StoredRow.objects.filter(trajectory__in=keys, last_step=None)
        rows = rows_with_tokens(own.order_by("trajectory_id", "index"))
        columns = columns_of_rows(own, [ADVANTAGES]) if rows else {}
        trained: dict[int, list[np.ndarray]] = defaultdict(list)
        for row in rows:
            n = min(len(row.tokens.ids), len(row.tokens.loss_mask))
            mask = row.tokens.loss_mask[:n]
            trained[row.trajectory_id].append(row.tokens.ids[:n][mask])
            values = columns.get(row.pk, {}).get(ADVANTAGES)
            if values is not None and row.trajectory_id not in advantages and len(values) == n and mask.any():
                advantages[row.trajectory_id] = float(np.mean(values[mask], dtype=np.float64))
        for key, parts in trained.items():
            if key not in sampled:
                sampled[key] = parts
    streams = {key: np.concatenate(parts) if parts else NO_IDS for key, parts in sampled.items()}
    return streams, {key: value for key, value in advantages.items() if math.isfinite(value)}, whole


def shared_questions(runs: Sequence[models.Run], limit: int) -> list[list[models.StoredTrajectory]]:
    """The first trajectories that all runs have, those with an error before the others. Three queries. Each is a
    trajectory of every run, in the order of the runs, all called alike: with one seed, they answer the same
    question."""
    of_any = models.StoredTrajectory.objects.filter(run__in=runs).order_by("index", "pk")
    wrong = of_any.filter(worst_severity=Severity.ERROR).values_list("external_id", flat=True)[: len(runs) * limit]
    others = of_any.filter(run=runs[0]).values_list("external_id", flat=True)[:limit]
    names = list(dict.fromkeys([*wrong, *others]))
    by_name = {(record.run_id, record.external_id): record for record in of_any.filter(external_id__in=names)}
    questions = []
    for name in names:
        sides = [by_name[run.pk, name] for run in runs if (run.pk, name) in by_name]
        if len(sides) == len(runs):
            questions.append(sides)
    return questions[:limit]


@dataclass(frozen=True)
class GroupStats:
    """The trajectories of one prompt."""

    n: int
    n_rewards: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def has_no_signal(self) -> bool:
        """All rewards are equal, so each group-relative advantage is zero."""
        return self.n_rewards > 1 and self.low == self.high


def group_stats(run: models.Run, groups: Sequence[str]) -> dict[str, GroupStats]:
    """The rewards of some groups of a run. One query."""
    trajectories = models.StoredTrajectory.objects.filter(run=run, group__in=[group for group in groups if group])
    rows = trajectories.values_list("group").annotate(
        n=Count("pk"), n_rewards=Count("reward"), total=Sum("reward", default=0.0), low=Min("reward"),
        high=Max("reward"),
    )
    return {group: GroupStats(n, scored, reward_mean(total, scored), *ends) for group, n, scored, total, *ends in rows}
