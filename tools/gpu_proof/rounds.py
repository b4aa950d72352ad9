"""An environment that asks a fixed number of times and ignores the answers. For load, not for learning."""

import random
from collections.abc import Mapping
from typing import Any

from rollouts.sampling.environments import Outcome, Task

_WORDS = "add take the sum of all numbers then divide by seven and say what remains for each crate box row".split()  # noqa: SIM905


class RoundsEpisode:
    def __init__(self, task: Task) -> None:
        self._rounds = int(task.data["rounds"])
        self._rng = random.Random(task.index)
        self._n = 0

    def step(self, message: Mapping[str, Any]) -> Outcome:
        self._n += 1
        if self._n >= self._rounds:
            return self._end("all_rounds")
        return Outcome([{"role": "user", "content": _text(self._rng, 24)}], done=False)

    def truncated(self, reason: str) -> Outcome:
        return self._end(reason)

    def _end(self, reason: str) -> Outcome:
        parts = {"rounds": float(self._n)}
        return Outcome([], True, reward=float(self._n), reward_parts=parts, stop_reason=reason)


class RoundsEnvironment:
    name = "rounds"

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def tasks(self, n: int, seed: int) -> list[Task]:
        rng = random.Random(f"rounds {seed}")
        return [
            Task([{"role": "user", "content": _text(rng, 64)}], None, None, index, {"rounds": self._rounds})
            for index in range(n)
        ]

    def start(self, task: Task) -> RoundsEpisode:
        return RoundsEpisode(task)


def _text(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=n_words)) + f" {rng.randrange(10**6)}?"
