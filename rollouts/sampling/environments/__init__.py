"""Environments: tools that answer, and rewards. One line in ``ENVIRONMENTS`` adds one."""

from collections.abc import Callable, Sequence
from functools import partial

from rollout_inspector.refusal import Refusal
from rollouts.sampling.environments import reasoning_gym, skyrl_gym
from rollouts.sampling.environments.calculator import CalculatorEnvironment
from rollouts.sampling.environments.lookup import LookupEnvironment
from rollouts.sampling.environments.prompts import PromptsEnvironment, PromptsRejected, read_prompts
from rollouts.sampling.environments.protocol import Environment, Episode, Outcome, Task

ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "calculator": CalculatorEnvironment,
    "lookup": LookupEnvironment,
    "prompts": PromptsEnvironment,
    **{f"skyrl_gym:{name}": partial(skyrl_gym.SkyRLGymEnvironment, name) for name in skyrl_gym.OFFERED},
    **{
        f"reasoning_gym:{name}": partial(reasoning_gym.ReasoningGymEnvironment, name) for name in reasoning_gym.DATASETS
    },
}

FAMILY_OF: dict[str, str] = {
    **{f"skyrl_gym:{name}": "skyrl gym" for name in skyrl_gym.OFFERED},
    **{
        f"reasoning_gym:{name}": f"reasoning gym, {topic}"
        for topic, names in reasoning_gym.FAMILIES.items()
        for name in names
    },
}
"""Name of an environment -> the heading under which forms offer it. Others stand without a heading."""

_WITHHELD = {
    **{f"skyrl_gym:{name}": why for name, why in skyrl_gym.WITHHELD.items()},
    **{f"reasoning_gym:{name}": why for name, why in reasoning_gym.WITHHELD.items()},
}


def environment(name: str, prompts: Sequence[Task] = ()) -> Environment:
    """The environment of that name. ``prompts`` are its tasks if it takes them from a file. Raises :class:`Refusal`
    with a sentence for the form."""
    if name in _WITHHELD:
        raise Refusal(f"{name} is not offered: {_WITHHELD[name]}")
    if name not in ENVIRONMENTS:
        raise Refusal(
            f"There is no environment named {name!r}; there are calculator, lookup, prompts, "
            "skyrl_gym:NAME and reasoning_gym:NAME."
        )
    if not prompts:
        return ENVIRONMENTS[name]()
    if name == "prompts":
        return PromptsEnvironment(prompts)
    family, _, env = name.partition(":")
    if family == "skyrl_gym":
        return skyrl_gym.SkyRLGymEnvironment(env, prompts)
    sentence = f"{name} makes its own tasks and takes no file of prompts"
    raise Refusal(f"{sentence}: leave the file out, or choose the environment prompts.")
