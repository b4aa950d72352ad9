"""What is verified of a finished run: the stored ids against the engine's, and the stored log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.prefix import link_steps
from rollout_inspector.streams.trajectory import Floats, Ids, Trajectory
from tools.gpu_proof.engine import Witness


@dataclass(frozen=True)
class IdsReport:
    """Stored steps compared with the ids that went into the engine and came out of it."""

    trajectories: int
    steps: int
    tokens_in: int
    tokens_out: int
    wrong_prompts: int
    wrong_completions: int
    unknown_requests: int
    """Requests of the engine without a stored step, and stored steps without a request."""
    broken_steps: int
    """Steps after the first that do not extend the stream of the step before."""

    @property
    def passed(self) -> bool:
        wrong = self.wrong_prompts + self.wrong_completions + self.unknown_requests + self.broken_steps
        return self.steps > 0 and wrong == 0


def check_ids(stored: Sequence[tuple[int, Trajectory]], seen: Witness) -> IdsReport:
    """Compare ``stored`` (trajectories with their keys) with the witness, which names requests by key and step."""
    sent = {tuple(name.split(".")[:2]): ids for name, ids in seen.sent.items()}
    received = {tuple(name.split(".")[:2]): ids for name, ids in seen.received.items()}
    wrong_prompts = wrong_completions = missing = broken = 0
    steps = [
        ((str(key), str(index)), step) for key, trajectory in stored for index, step in enumerate(trajectory.steps)
    ]
    for place, step in steps:
        if place not in sent or place not in received:
            missing += 1
            continue
        wrong_prompts += not np.array_equal(sent[place], step.prompt_ids)
        wrong_completions += not np.array_equal(received[place], step.completion_ids)
    for _, trajectory in stored:
        broken += sum(not link.extends for link in link_steps(trajectory.steps)[1:])
    return IdsReport(
        trajectories=len(stored),
        steps=len(steps),
        tokens_in=sum(len(step.prompt_ids) for _, step in steps),
        tokens_out=sum(len(step.completion_ids) for _, step in steps),
        wrong_prompts=wrong_prompts,
        wrong_completions=wrong_completions,
        unknown_requests=missing + len(sent.keys() - {place for place, _ in steps}),
        broken_steps=broken,
    )


@dataclass(frozen=True)
class ScoreReport:
    """Stored log-probabilities against vLLM's own scores of the stored stream, and of a re-tokenized one."""

    tokens: int
    mean: float
    """Mean absolute difference per sampled token, in nats."""
    highest: float
    completions: int
    completion_mean: float
    """Mean absolute difference of a whole completion's log-probability, in nats."""
    retokenized: int
    """Completions that get other ids when they are decoded and encoded."""
    retokenized_mean: float
    """The same mean for such a completion, scored on the re-tokenized stream, in nats."""
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.tokens > 0 and self.mean <= self.tolerance

    @property
    def retokenized_disagrees(self) -> bool:
        """Whether the difference exceeds ten times the tolerance per token, which rounding alone never does."""
        per_completion = self.tokens / max(1, self.completions)
        return self.retokenized > 0 and self.retokenized_mean > 10 * self.tolerance * per_completion


Score = Callable[[Sequence[Ids]], list[Floats]]


def check_logprobs(trajectories: Sequence[Trajectory], score: Score, codec: Codec, tolerance: float) -> ScoreReport:
    """Score the last stream of each trajectory. Every step extends the one before, so this stream holds them all."""
    differences: list[Floats] = []
    sums: list[float] = []
    retokenized: list[float] = []
    again = [_retokenized(trajectory, codec) for trajectory in trajectories]
    scored = score([trajectory.steps[-1].stream for trajectory in trajectories])
    scored_again = score([ids for ids, _ in again])
    for trajectory, own, (_, places), other in zip(trajectories, scored, again, scored_again, strict=True):
        for step, place in zip(trajectory.steps, places, strict=True):
            assert step.logprobs is not None
            start = len(step.prompt_ids)
            logprobs = own[start : start + len(step.completion_ids)]
            differences.append(np.abs(logprobs - step.logprobs))
            sums.append(abs(float(np.sum(logprobs - step.logprobs))))
            if place.changed:
                total = float(np.sum(other[place.start : place.stop]))
                retokenized.append(abs(total - float(np.sum(step.logprobs))))
    flat = np.concatenate(differences)
    return ScoreReport(
        tokens=len(flat),
        mean=float(flat.mean()),
        highest=float(flat.max()),
        completions=len(sums),
        completion_mean=float(np.mean(sums)),
        retokenized=len(retokenized),
        retokenized_mean=float(np.mean(retokenized)) if retokenized else 0.0,
        tolerance=tolerance,
    )


@dataclass(frozen=True)
class _Place:
    start: int
    stop: int
    changed: bool


def _retokenized(trajectory: Trajectory, codec: Codec) -> tuple[Ids, list[_Place]]:
    """The stream after each completion was decoded and encoded again, and where the completions lie in it.

    One of the few places that may encode decoded text: it shows what would happen.
    """
    parts: list[Ids] = []
    places: list[_Place] = []
    length = n_taken = 0
    for step in trajectory.steps:
        before = step.prompt_ids[n_taken:]
        after = codec.encode(codec.decode(step.completion_ids))
        parts += [before, after]
        start = length + len(before)
        length = start + len(after)
        places.append(_Place(start, length, not np.array_equal(after, step.completion_ids)))
        n_taken = len(step.prompt_ids) + len(step.completion_ids)
    return np.concatenate(parts), places
