"""Forks of trajectories: made, found, and what their samples came to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Q

from rollout_inspector.streams.figures import paired_difference, reward_mean
from rollout_inspector.streams.trajectory import FORKED, Ids
from rollouts.store.models import ACTIVE, Fork, Run, StoredStep, StoredTrajectory
from rollouts.store.token_arrays.reading import attach_steps, fork_prefix

SUCCESS = 0.5
"""The reward from which on a continuation counts as a success."""
MAX_FORKS = 50
"""The newest forks of a trajectory that its page lists."""


@dataclass(frozen=True)
class ForkSample:
    """One continuation."""

    code: str
    """Code of its trajectory."""
    status: str
    seed: int | None
    reward: float | None
    n_tokens: int
    """Tokens that it adds to the parent."""
    n_sampled: int
    n_steps: int
    error: str


def add_fork(run: Run, parent: StoredTrajectory, **fields: Any) -> dict[str, Mapping[str, Any]]:
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


def sides_of(pair: str) -> dict[str, Fork]:
    """Side -> its fork, with run and parent, of the two that continue from both sides of a break. One query."""
    forks = Fork.objects.select_related("run__project", "parent__run").filter(~Q(pair=""), pair=pair)
    return {fork.side: fork for fork in forks}


def samples_of(runs: Collection[int]) -> dict[int, list[ForkSample]]:
    """Key of a run -> its continuations, in order. One query."""
    samples: dict[int, list[ForkSample]] = defaultdict(list)
    columns = ("code", "status", "seed", "reward", "n_tokens", "n_sampled", "n_steps", "error")
    stored = StoredTrajectory.objects.filter(run__in=runs).order_by("run", "index")
    for run, *values in stored.values_list("run", *columns):
        samples[run].append(ForkSample(*values))
    return samples


def first_completions(runs: Collection[int]) -> dict[int, list[Ids]]:
    """Key of a run -> the first completion of each of its continuations that has one. One query."""
    steps = StoredStep.objects.filter(trajectory__run__in=runs, index=0).annotate(run=F("trajectory__run"))
    completions: dict[int, list[Ids]] = defaultdict(list)
    for step in attach_steps(steps.select_related("tokens", "segment").order_by("trajectory__index"), ("completion_ids",)):
        completions[step.run].append(step.tokens.completion_ids)  # type: ignore[attr-defined]
    return completions


@dataclass(frozen=True)
class SideFigures:
    """One side of a break."""

    run: str
    """Code of the run that continues from it."""
    status: str
    mean: float | None
    """Mean reward; null = none has a reward."""
    n: int
    """Continuations that have ended."""
    n_asked: int


@dataclass(frozen=True)
class Difference:
    """Broken - sampled, over pairs with one seed."""

    n: int
    """Pairs of which both sides have ended and have the number."""
    difference: float | None
    """Null = there are fewer than two pairs."""
    interval: tuple[float | None, float | None]
    """95 %."""

    @property
    def is_seen(self) -> bool:
        """The interval does not hold 0."""
        low, high = self.interval
        return low is not None and high is not None and not low <= 0 <= high

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Difference:
        effect = paired_difference(pairs)
        return cls(len(pairs), None, (None, None)) if effect is None else cls(len(pairs), effect[0], effect[1:])


@dataclass(frozen=True)
class BreakEffect:
    """What a break did to the policy: two runs that continue from both of its sides."""

    pair: str
    finding: int
    """Number of the finding."""
    sampled: SideFigures
    broken: SideFigures
    reward: Difference
    success: Difference
    """Of the share of continuations with a reward of at least 0.5."""
    length: Difference
    """Of the sampled tokens."""

    @property
    def sentence(self) -> str:
        """The effect in words."""
        change, n = self.reward, min(self.sampled.n, self.broken.n)
        if n < min(self.sampled.n_asked, self.broken.n_asked) and is_any_active(self.sampled.status, self.broken.status):
            return f"{self.sampled.n + self.broken.n} of {self.sampled.n_asked + self.broken.n_asked} have ended."
        if change.difference is None:
            change = self.length
            if change.difference is None:
                return "Too few continuations have ended to compare the two sides."
            what, words = "No continuation has a reward. Length", "tokens"
        else:
            what, words = "Reward", ""
        low, high = change.interval
        if not change.is_seen:
            return f"{what}: no difference to be seen with n = {change.n} ({low:+.3g} to {high:+.3g} {words}".rstrip() + ")."
        return f"{what} of the broken side: {change.difference:+.3g} {words}".rstrip() + (
            f" (95 %: {low:+.3g} to {high:+.3g}, n = {change.n})."
        )

    def contract(self) -> dict[str, Any]:
        """As the command prints it."""
        sides = {
            name: {"run": side.run, "mean": side.mean, "n": side.n}
            for name, side in (("sampled", self.sampled), ("broken", self.broken))
        }
        change = self.reward
        return sides | {
            "difference": change.difference, "interval": list(change.interval), "seen": change.is_seen
        }


def is_any_active(*statuses: str) -> bool:
    """Whether one of these is the status of what goes on."""
    return any(status in ACTIVE for status in statuses)


def effect_of(pair: str) -> BreakEffect | None:
    """What the two runs of a break came to so far; None where one of them was deleted. Two queries."""
    sides = sides_of(pair)
    if len(sides) < 2:
        return None
    return effects_of(list(sides.values()), samples_of([side.pk for side in sides.values()]))[0]


def effects_of(forks: Sequence[Fork], samples: Mapping[int, Sequence[ForkSample]]) -> list[BreakEffect]:
    """The effects of the breaks of which both sides are among some forks, in their order. No query."""
    by_pair: dict[str, dict[str, Fork]] = defaultdict(dict)
    for fork in forks:
        if fork.pair:
            by_pair[fork.pair][fork.side] = fork
    return [_effect(pair, sides, samples) for pair, sides in by_pair.items() if len(sides) == len(Fork.Side.values)]


def _effect(pair: str, sides: Mapping[str, Fork], samples: Mapping[int, Sequence[ForkSample]]) -> BreakEffect:
    figures, ended = [], []
    for name in (Fork.Side.SAMPLED, Fork.Side.BROKEN):
        run = sides[name].run
        of_side = [sample for sample in samples.get(run.pk, ()) if sample.status == StoredTrajectory.Status.DONE]
        rewards = [sample.reward for sample in of_side if sample.reward is not None]
        mean = reward_mean(sum(rewards), len(rewards))
        figures.append(SideFigures(run.code, run.status, mean, len(of_side), run.n_expected))
        ended.append({sample.seed: sample for sample in of_side})
    pairs = [(ended[0][seed], ended[1][seed]) for seed in ended[0] if seed in ended[1]]
    scored = [(a.reward, b.reward) for a, b in pairs if a.reward is not None and b.reward is not None]
    return BreakEffect(
        pair, sides[Fork.Side.SAMPLED].finding or 0, *figures,
        reward=Difference.of(scored),
        success=Difference.of([(float(a >= SUCCESS), float(b >= SUCCESS)) for a, b in scored]),
        length=Difference.of([(float(a.n_sampled), float(b.n_sampled)) for a, b in pairs]),
    )


def keep_prefixes(parents: Sequence[int]) -> None:
    """Let the forks of trajectories that are deleted keep the ids that they share with them."""
    for fork in Fork.objects.select_related("base_step").filter(parent__in=parents):
        Fork.objects.filter(pk=fork.pk).update(
            tail_ids=fork_prefix(fork), n_shared=0, base_step=None, parent=None
        )
