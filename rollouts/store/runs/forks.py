"""Forks of trajectories: made, found, and what their samples came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from django.db.models import F

from rollout_inspector.streams.figures import paired_difference, reward_mean
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import FORKED, Ids
from rollouts.store.models import ACTIVE, Fork, Run, StoredStep, StoredTrajectory
from rollouts.store.token_arrays.reading import attach_steps, fork_prefix

SUCCESS = 0.5  # The reward from which on a continuation counts as a success.
MAX_BRANCH_IDS = 24  # Ids of a stretch that its branch names.
TREE_CALLS = 4  # Engine calls of a continuation that its tree holds.
MAX_FORKS = 50  # The newest forks of a trajectory that its page lists.


@dataclass(frozen=True)
class ForkSample:
    """One continuation."""

    code: str
    """Code of its trajectory."""
    status: str
    """``queued``, ``running``, ``done`` or ``failed``."""
    seed: int | None
    """Both sides of a break have the same seeds."""
    reward: float | None
    """Null = it has none."""
    n_tokens: int
    """Tokens that it adds to the parent."""
    n_sampled: int
    """Tokens that were sampled."""
    n_steps: int
    """Engine calls."""
    error: str
    """Why it failed."""


def add_fork(run: Run, parent: StoredTrajectory, **fields: Any) -> dict[str, Any]:
    """Store where the trajectories of a run begin. Returns what each of them keeps of it."""
    Fork.objects.create(run=run, parent=parent, **fields)
    place = {FORKED: {"trajectory": parent.code, "row": fields["row"], "offset": fields["offset"]}}
    run.settings |= place
    run.save(update_fields=["settings"])
    return place


def find_fork(run: Run) -> Fork | None:
    """Where the trajectories of a run begin; None for a run that continues none. One query."""
    return Fork.objects.select_related("parent__run", "base_step").filter(run=run).first()


def forks_of(trajectory: StoredTrajectory) -> list[Fork]:
    """The newest forks of a trajectory, with their runs. One query."""
    forks = Fork.objects.select_related("run").filter(parent=trajectory)
    return list(forks.order_by("-run__created_at", "-run")[:MAX_FORKS])


@dataclass(frozen=True)
class ForkBranch:
    """A stretch of ids that some continuations have in common; behind it they part, or end."""

    start: int
    """Where it begins, as an offset in their rows."""
    stop: int
    """Where they part, or end."""
    ids: list[int]
    """The first 24 ids of the stretch; empty = it ends here, and others go on."""
    samples: list[str]
    """Codes of the trajectories that have it."""
    reward_mean: float | None
    """Of those that have ended and have a reward."""
    branches: list[ForkBranch]
    """What follows, the most frequent first; empty = these are equal to their end."""


@dataclass(frozen=True)
class ForkFigures:
    """A fork, and what its continuations came to."""

    run: str
    """Code of its run."""
    status: str
    """Of its run."""
    row: int
    """The row of the parent."""
    offset: int
    """The place in the row: the first token that is not the parent's."""
    token_id: int | None
    """The token that stands there instead; null = none does."""
    text: str | None
    """The text of the observation instead; null = none."""
    side: str
    """``sampled`` or ``broken`` of a finding; empty = it was asked for alone."""
    finding: int | None
    """Number of that finding."""
    pair: str
    """Both sides of it share this code."""
    expected: int
    """Continuations that were asked for."""
    finished: int
    """Those that have ended."""
    failed: int
    """Those that ended with an error."""
    reward_mean: float | None
    """Of those that have a reward."""
    length_mean: float | None
    """Sampled tokens of those that have ended."""
    calls_mean: float | None
    """Engine calls of those that have ended."""
    parts_at: int | None
    """The first token at which the continuations differ, as an offset in their rows; null = they do not."""
    samples: list[ForkSample]
    """Each continuation."""
    tree: ForkBranch | None
    """The first four calls of the continuations as a tree, while each goes on from the one before; null = none yet."""


@dataclass(frozen=True)
class PairedDifference:
    """Broken - sampled, over pairs with one seed."""

    n: int
    """Pairs of which both sides have ended and have the number."""
    difference: float | None
    """The mean; null = there are fewer than two pairs."""
    interval: tuple[float | None, float | None]
    """95 %, from low to high."""
    is_seen: bool
    """The interval does not hold 0."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Self:
        """The difference of second - first."""
        if (effect := paired_difference(pairs)) is None:
            return cls(len(pairs), None, (None, None), False)
        difference, low, high = effect
        return cls(len(pairs), difference, (low, high), not low <= 0 <= high)

    def words(self, unit: str = "") -> str:
        """The difference in words, without a full stop."""
        if self.difference is None:
            return "too few pairs have ended to compare the two sides"
        difference, low, high = (f"{n:+.3g}{unit}".replace("-", "−") for n in (self.difference, *self.interval))
        if not self.is_seen:
            return f"no difference to be seen with n = {self.n} (95 %: {low} to {high})"
        return f"{difference} on the broken side (95 %: {low} to {high}, n = {self.n})"


@dataclass(frozen=True)
class BreakEffect:
    """What a break did to the policy: broken - sampled, over two runs that continue from both of its sides."""

    finding: int | None
    """Number of the finding."""
    sampled: str
    """Code of the run that continues from what was sampled."""
    broken: str
    """Code of the run that continues from what was made of it."""
    active: bool
    """Whether a worker is at it."""
    reward: PairedDifference
    """Of the rewards."""
    success: PairedDifference
    """Of the share with a reward of at least 0.5."""
    length: PairedDifference
    """Of the sampled tokens."""

    @property
    def words(self) -> dict[str, str]:
        """What is compared -> the effect on it."""
        return {"Reward": self.reward.words(), "Success": self.success.words(), "Length": self.length.words(" tokens")}


def effects_of(figures: Sequence[ForkFigures]) -> list[BreakEffect]:
    """The effects of the breaks of which both sides are among some forks, in their order. No query."""
    pairs: dict[str, dict[str, ForkFigures]] = defaultdict(dict)
    for fork in figures:
        pairs[fork.pair][fork.side] = fork
    return [
        _effect(sides[Fork.Side.SAMPLED], sides[Fork.Side.BROKEN])
        for pair, sides in pairs.items() if pair and len(sides) == len(Fork.Side.values)
    ]


def _effect(sampled: ForkFigures, broken: ForkFigures) -> BreakEffect:
    first, second = (
        {sample.seed: sample for sample in side.samples if sample.status == Run.Status.DONE}
        for side in (sampled, broken)
    )
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    scored = [(a.reward, b.reward) for a, b in pairs if a.reward is not None and b.reward is not None]
    return BreakEffect(
        sampled.finding, sampled.run, broken.run, sampled.status in ACTIVE or broken.status in ACTIVE,
        PairedDifference.of(scored),
        PairedDifference.of([(float(a >= SUCCESS), float(b >= SUCCESS)) for a, b in scored]),
        PairedDifference.of([(float(a.n_sampled), float(b.n_sampled)) for a, b in pairs]),
    )


def fork_figures(forks: Sequence[Fork]) -> list[ForkFigures]:
    """What the continuations of forks came to. Three queries, and those of the arrays."""
    of_forks = [fork.pk for fork in forks]
    samples: dict[int, list[ForkSample]] = defaultdict(list)
    columns = ("code", "status", "seed", "reward", "n_tokens", "n_sampled", "n_steps", "error")
    stored = StoredTrajectory.objects.filter(run__in=of_forks).order_by("run", "index")
    for run, *values in stored.values_list("run", *columns):
        samples[run].append(ForkSample(*values))
    steps = StoredStep.objects.filter(trajectory__run__in=of_forks, index__lt=TREE_CALLS).order_by("index")
    steps = steps.annotate(run=F("trajectory__run"), code=F("trajectory__code")).select_related("tokens", "segment")
    streams: dict[int, dict[str, list[Ids]]] = defaultdict(dict)
    last: dict[str, int] = {}
    for step in attach_steps(steps.filter(index=0).order_by("trajectory__index"), ("completion_ids",)):
        streams[step.run][step.code] = [step.tokens.completion_ids]  # type: ignore[attr-defined]
        last[step.code] = step.pk  # type: ignore[attr-defined]
    for step in attach_steps(steps.filter(index__gt=0), ("delta_ids", "completion_ids")):
        run, code = step.run, step.code  # type: ignore[attr-defined]
        # A break, or a call of a lane: behind it an offset means another token.
        if step.parent_id == last.get(code) and step.shared_length == step.parent_length:
            streams[run][code] += step.tokens.delta_ids, step.tokens.completion_ids
            last[code] = step.pk
    return [
        _figures(fork, samples[fork.pk], {code: np.concatenate(ids) for code, ids in streams[fork.pk].items()})
        for fork in forks
    ]


def _figures(fork: Fork, samples: list[ForkSample], streams: Mapping[str, Ids]) -> ForkFigures:
    ended = [sample for sample in samples if sample.status == StoredTrajectory.Status.DONE]
    rewards = {sample.code: sample.reward for sample in ended if sample.reward is not None}
    start = fork.n_shared + len(fork.tail_ids)
    n = len(ended) or None
    tree = _branch(streams, list(streams), 0, start, rewards) if streams else None
    return ForkFigures(
        fork.run.code, fork.run.status, fork.row, fork.offset, fork.token_id, fork.text, fork.side,
        fork.finding, fork.pair, fork.run.n_expected, len(ended), fork.run.n_failed,
        reward_mean(sum(rewards.values()), len(rewards)),
        n and sum(sample.n_sampled for sample in ended) / n, n and sum(sample.n_steps for sample in ended) / n,
        tree.stop if tree and tree.branches else None, samples, tree,
    )


def _branch(
    streams: Mapping[str, Ids], codes: list[str], at: int, start: int, rewards: Mapping[str, float]
) -> ForkBranch:
    """The tree of some streams that are equal up to ``at``; the first of them begins at ``start`` of a row."""
    first = streams[codes[0]]
    stop = at + min(common_prefix(first[at:], streams[code][at:]) for code in codes)
    following: dict[int | None, list[str]] = defaultdict(list)
    for code in codes:
        following[int(streams[code][stop]) if stop < len(streams[code]) else None].append(code)
    groups = sorted(following.values(), key=len, reverse=True) if len(following) > 1 else []
    scored = [rewards[code] for code in codes if code in rewards]
    return ForkBranch(
        start + at, start + stop, first[at:stop][:MAX_BRANCH_IDS].tolist(), codes,
        reward_mean(sum(scored), len(scored)), [_branch(streams, group, stop, start, rewards) for group in groups],
    )


def keep_prefixes(parents: Sequence[int]) -> None:
    """Let the forks of trajectories that are deleted keep the ids that they share with them."""
    for fork in Fork.objects.select_related("base_step").filter(parent__in=parents):
        Fork.objects.filter(pk=fork.pk).update(tail_ids=fork_prefix(fork), n_shared=0, base_step=None, parent=None)
