"""SkyRL-Gym: its text environments, with observations as messages. The package is imported when an episode starts."""

import random
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rollout_inspector.refusal import Refusal
from rollouts.sampling.environments.arithmetic import random_problem
from rollouts.sampling.environments.prompts import PromptsEnvironment
from rollouts.sampling.environments.protocol import Outcome, Task, import_package

OFFERED = {
    "gsm8k": ('Think step by step and write the final number behind "####".', "reward_spec"),
    "gsm8k_multi_turn": ('Think step by step and end every turn with your number so far behind "####".', "reward_spec"),
    "aime": ('Think step by step. The last line is "Answer: " and the number.', "reward_model"),
}
"""Environment -> the text after a question, and the key under which SkyRL-Gym looks for the right answer."""

_EXECUTES = "it executes code that the model writes, on the machine of the worker."
WITHHELD: dict[str, str] = {
    "lcb": _EXECUTES,
    "search": "it sends what the model writes to a network address.",
    "searchcode": "it executes code that the model writes and sends queries to a network address.",
    "text2sql": "it executes SQL that the model writes, on database files that the package lacks.",
    "rlm": _EXECUTES,
}
"""Environments of the package that are not offered, and why."""


def load_package() -> ModuleType:
    """Import the package. Raises :class:`Refusal` when it is not installed."""
    return import_package("skyrl_gym")


class SkyRLGymEpisode:
    """One of the package's environments. A trajectory's reward is the sum of its turns' rewards, which are kept too."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._rewards: list[float] = []

    def step(self, message: Mapping[str, Any]) -> Outcome:
        # The thoughts are part of the text of a turn, as in SkyRL.
        content, thoughts = message.get("content"), message.get("reasoning_content")
        text = content if isinstance(content, str) else ""
        out = self._env.step(f"<think>{thoughts}</think>{text}" if isinstance(thoughts, str) and thoughts else text)
        self._rewards.append(float(out["reward"]))
        observations = [dict(observation) for observation in out["observations"] or ()]
        if out["done"]:
            return self._end("done")
        if not observations:
            # Without an observation there is nothing to put between two turns of the model.
            return self._end("no_observation")
        return Outcome(messages=observations, done=False)

    def truncated(self, reason: str) -> Outcome:
        return self._end(reason)

    def _end(self, reason: str) -> Outcome:
        parts = {f"turn_{turn}": reward for turn, reward in enumerate(self._rewards)}
        for name, value in self._env.get_metrics().items():
            if isinstance(value, int | float):
                parts[name] = float(value)
        self._env.close()
        return Outcome([], True, reward=sum(self._rewards), reward_parts=parts, stop_reason=reason)


class SkyRLGymEnvironment:
    """The package has no tasks. They come from a file of prompts; without one, arithmetic with whole answers."""

    def __init__(self, env: str, prompts: Sequence[Task] = ()) -> None:
        self.name = f"skyrl_gym:{env}"
        self._env, self._prompts = env, prompts

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Raises :class:`Refusal` without the package, or when a prompt has no answer."""
        load_package()
        if self._prompts:
            if any(prompt.answer is None for prompt in self._prompts):
                raise Refusal(f'{self.name} scores every prompt, and a line of the file has no "answer".')
            return PromptsEnvironment(self._prompts).tasks(n, seed)
        rng = random.Random(f"skyrl gym tasks {seed}")
        return [self._task(rng, index) for index in range(n)]

    def _task(self, rng: random.Random, index: int) -> Task:
        while True:
            problem = random_problem(rng)
            if re.fullmatch(r"-?\d+", problem.answer):
                content = f"{problem.question} {OFFERED[self._env][0]}"
                return Task([{"role": "user", "content": content}], None, problem.answer, index)

    def start(self, task: Task) -> SkyRLGymEpisode:
        # The environment looks in "extra_info" for a number of turns. Empty = its default.
        extras = {OFFERED[self._env][1]: {"ground_truth": task.answer}, "extra_info": {}}
        env = load_package().make(self._env, extras=extras)
        env.init([dict(message) for message in task.messages])
        return SkyRLGymEpisode(env)
